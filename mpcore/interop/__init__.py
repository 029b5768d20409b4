"""Models made elsewhere: `parallelize` swaps the layers of a model that you already have."""
