"""A user's program: a few steps of one of TRL's trainers with a tiny model, from a folder. It has no line of
liger_aot's.

    python -m tests.models.trainer_program TRAINER FOLDER JSON     # JSON: {"arguments": {...}, "model": {...}}

Prints the losses and, of what Liger patched, whose function runs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.models.transformers_cases import tiny

WORDS = ["<pad>", "<s>", "</s>", "<unk>", *map(str, range(100))]
TEXTS = [" ".join(str((7 * i + j) % 100) for j in range(5 + 3 * i)) for i in range(6)]
DATA: dict[str, dict[str, list[str]]] = {
    "SFT": {"text": TEXTS},
    "DPO": {"prompt": TEXTS, "chosen": ["1 2 3"] * 6, "rejected": ["4 5"] * 6},
    "GRPO": {"prompt": TEXTS},
    "RLOO": {"prompt": TEXTS},
    "KTO": {"prompt": TEXTS, "completion": ["1 2 3", "4 5"] * 3, "label": [True, False] * 3},
}


def saved(folder: Path) -> Any:
    """A model's folder, and its tokenizer."""
    if not (folder / "config.json").exists():
        tiny("llama", vocab_size=len(WORDS)).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.save_pretrained(folder)
    return fast


def main(name: str, folder: Path, given: dict[str, Any]) -> None:
    tokenizer = saved(folder)
    arguments = {
        "output_dir": str(folder / "trained"), "use_cpu": True, "max_steps": 2, "per_device_train_batch_size": 2,
        "save_strategy": "no", "report_to": [], "disable_tqdm": True, "bf16": False, "logging_steps": 1,
        "gradient_checkpointing": False, "model_init_kwargs": {"dtype": "float32"} | given.get("model", {}),
    }  # fmt: skip
    more: dict[str, Any] = {}
    if name in ("GRPO", "RLOO"):
        arguments |= {"num_generations": 2, "max_completion_length": 6, "beta": 0.1}
        more["reward_funcs"] = lambda completions, **_: [float(len(c)) for c in completions]
    config = getattr(trl, f"{name}Config")(**(arguments | given.get("arguments", {})))
    data = Dataset.from_dict(DATA[name])
    trainer = getattr(trl, f"{name}Trainer")(
        str(folder), args=config, train_dataset=data, processing_class=tokenizer, **more
    )
    trainer.train()
    losses = [round(entry["loss"], 4) for entry in trainer.state.log_history if "loss" in entry]
    ours = None
    if config.use_liger_kernel:
        from liger_kernel.ops import LigerRMSNormFunction

        norm = trainer.model.get_submodule("model.norm")
        ours = [LigerRMSNormFunction.__module__, norm.forward.__func__.__module__]
    print(
        json.dumps({"losses": losses, "ours": ours, "attention": trainer.model.config._attn_implementation})
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
