"""The tests. None of them asks the Hub of Hugging Face."""

import os

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}  # before transformers and datasets are imported
