"""Models made elsewhere: `parallelize` swaps the layers of any model, `hugging_face` reads and writes its folders."""
