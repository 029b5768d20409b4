"""Use models made elsewhere: shard any model (`parallelize`), use Hugging Face folders, and add LoRA adapters."""
