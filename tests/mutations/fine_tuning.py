"""Fine-tuning another's model on a newcomer's text, broken."""

from tests.mutations import Mutation

ARGUMENTS, HF, PRETRAIN = (f"examples/gpt/{name}.py" for name in ("arguments", "hf", "pretrain"))
TESTS = "tests/examples/test_hf.py::"
COMMAND = "tests/examples/test_pretrain_command.py::"
CARRIED = TESTS + "test_what_goes_along_with_a_model_stays_with_it_through_training"
STOPS = TESTS + "test_what_was_trained_here_stops_at_the_end_of_a_document_there"
GOES_ON = TESTS + "test_a_run_that_began_with_another_model_goes_on_without_its_weights"

MUTATIONS = [
    Mutation("ids are drawn that the tokenizer has not", "examples/gpt/generate.py",
             "pipeline.from_last(logits)[: tokenizer.vocab_size]", "pipeline.from_last(logits)",
             COMMAND + "test_no_id_is_drawn_that_the_tokenizer_has_not"),
    Mutation("a sample that fails ends a run that is done", PRETRAIN,
             "except Exception as error:  # the tokenizers'", "except OSError as error:  # the tokenizers'",
             COMMAND + "test_a_sample_that_fails_ends_no_run_that_is_done"),
    Mutation("a folder without a tokenizer is one of bytes", HF,
             'read_json(path.with_name("config.json"))\n        there', 'return "byte"\n        there',
             TESTS + "test_training_begins_with_a_model_of_theirs_on_any_layout"),
    Mutation("an export doesn't say what ends a document", HF,
             '"eos_token_id": tokenizer.end_of_document}', '"eos_token_id": None}', STOPS),
    Mutation("an export's tokenizer doesn't know what ends a document", HF,
             '"eos_token": tokenizer.end_of_document_name}', '"pad_token": tokenizer.end_of_document_name}', STOPS),
    Mutation("an export is as long as the run's samples", ARGUMENTS,
             "length > (args.seq_len or config.seq_len):", "False:", CARRIED),
    Mutation("an export with a path of nothing has no tokenizer", HF,
             "    if not found:\n        raise ValueError(f\"{path} is no tokenizer.json",
             "    if False:\n        raise ValueError(f\"{path} is no tokenizer.json",
             TESTS + "test_the_command_converts_both_ways"),
    Mutation("an import in half precision is refused", PRETRAIN, "strict=False, cast=True)", "strict=False)",
             TESTS + "test_training_begins_with_an_import_in_half_precision"),
    Mutation("every load casts", "mpcore/checkpoint/loading.py", "    cast: bool = False,\n) ->",
             "    cast: bool = True,\n) ->",
             TESTS + "test_training_begins_with_an_import_in_half_precision"),
    Mutation("the first weights are read over those of a resumed run", PRETRAIN,
             "        if not self.resume():\n", "        if self.resume() or True:\n", GOES_ON),
    Mutation("a run goes on with another tokenizer", PRETRAIN,
             '            "tokenizer": self.tokenizer.fingerprint,\n', "",
             TESTS + "test_a_run_goes_on_with_its_own_tokenizer_alone"),
    Mutation("records of a .json are one document", "examples/gpt/prepare.py",
             "if isinstance(first, dict) and self.json_key in first:", "if False:",
             "tests/examples/test_prepare.py::test_records_in_a_json_file_are_not_one_document"),
]  # fmt: skip
