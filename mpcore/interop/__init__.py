"""Floor 4: models of other libraries. `hugging_face` reads and writes the folders of transformers."""
