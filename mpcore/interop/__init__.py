"""Use models made elsewhere: shard any model (`parallelize`), read and write Hugging Face folders, add LoRA adapters."""
