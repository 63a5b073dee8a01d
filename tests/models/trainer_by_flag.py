"""A user's run of a trainer that turns Liger on by a flag of its own: two steps of a tiny model, from a folder. It has
no line of liger_aot's.

    python -m tests.models.trainer_by_flag TRAINER FOLDER LIGER     # LIGER: 1 or 0

Prints the losses and, of what the trainer patched, whose function runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

WORDS = ["<pad>", "<s>", "</s>", "<unk>", *map(str, range(100))]
TEXTS = [" ".join(str((7 * i + j) % 100) for j in range(5 + 3 * i)) for i in range(8)]
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
LR = 1e-2  # so that a wrong gradient shows in the second loss

LOSSES: list[float] = []


class Losses(TrainerCallback):  # type: ignore[misc]
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            LOSSES.append(round(float(logs["loss"]), 4))


def saved(folder: Path) -> Path:
    """A model with its tokenizer, the same in every process."""
    model = folder / "model"
    if not (model / "config.json").exists():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(WORDS), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            initializer_range=0.3, architectures=["LlamaForCausalLM"],
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(model)
        words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        named = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **named)
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(model)
    return model


def llama_factory(folder: Path, liger: bool) -> None:
    """Its `train` command's function."""
    from llamafactory.train.tuner import run_exp

    rows = [{"instruction": text, "input": "", "output": text[::-1]} for text in TEXTS]
    (folder / "data.json").write_text(json.dumps(rows))
    (folder / "dataset_info.json").write_text(json.dumps({"numbers": {"file_name": "data.json"}}))
    run_exp(
        {
            "model_name_or_path": str(folder / "model"), "enable_liger_kernel": liger, "stage": "sft",
            "do_train": True, "finetuning_type": "full", "dataset": "numbers", "dataset_dir": str(folder),
            "template": "empty", "cutoff_len": 64, "output_dir": str(folder / "trained"), "use_cpu": True,
            "max_steps": 2, "per_device_train_batch_size": 4, "logging_steps": 1, "save_strategy": "no",
            "report_to": "none", "disable_gradient_checkpointing": True, "learning_rate": LR,
            "overwrite_output_dir": True, "flash_attn": "sdpa",
        },
        [Losses()],
    )  # fmt: skip


def ms_swift(folder: Path, liger: bool) -> None:
    """`swift sft`: the function of the process that it starts."""
    from swift.pipelines import sft_main

    rows = [
        {"messages": [{"role": "user", "content": t}, {"role": "assistant", "content": t}]} for t in TEXTS
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given: dict[str, Any] = {
        "model": folder / "model", "use_liger_kernel": str(liger).lower(), "dataset": folder / "data.jsonl",
        "model_type": "llama", "template": "dummy", "tuner_type": "full", "torch_dtype": "float32", "use_cpu": "true",
        "max_steps": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "logging_steps": 1,
        "save_strategy": "no", "report_to": "none", "learning_rate": LR, "output_dir": folder / "trained",
        "gradient_checkpointing": "false", "split_dataset_ratio": 0, "dataset_num_proc": 1,
        "dataloader_num_workers": 0, "max_length": 64,
    }  # fmt: skip
    arguments = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    sft_main(arguments)
    log = sorted((folder / "trained").glob("*/logging.jsonl"))[-1].read_text().splitlines()
    LOSSES.extend(round(float(entry["loss"]), 4) for entry in map(json.loads, log) if "loss" in entry)


def axolotl(folder: Path, liger: bool) -> None:
    """`axolotl train`: the function of the process that it starts."""
    import yaml
    from axolotl.cli.args import TrainerCliArgs
    from axolotl.cli.config import load_cfg
    from axolotl.common.datasets import load_datasets
    from axolotl.train import train

    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    names = ("rope", "rms_norm", "glu_activation", "fused_linear_cross_entropy")
    given = {
        "base_model": str(folder / "model"), "datasets": [{"path": str(folder / "data.jsonl"), "type": "completion"}],
        "ds_type": "json", "output_dir": str(folder / "trained"), "sequence_len": 64, "micro_batch_size": 4,
        "gradient_accumulation_steps": 1, "max_steps": 2, "learning_rate": LR, "optimizer": "adamw_torch",
        "lr_scheduler": "constant", "logging_steps": 1, "save_strategy": "no", "bf16": False, "tf32": False,
        "dataset_prepared_path": str(folder / "prepared"), "val_set_size": 0, "attn_implementation": "sdpa",
        "save_only_model": True,
    }  # fmt: skip
    if liger:
        given |= {"plugins": ["axolotl.integrations.liger.LigerPlugin"]}
        given |= {f"liger_{name}": True for name in names}
    (folder / "axolotl.yml").write_text(yaml.safe_dump(given))
    config = load_cfg(str(folder / "axolotl.yml"))
    _, _, trainer = train(cfg=config, dataset_meta=load_datasets(cfg=config, cli_args=TrainerCliArgs()))
    LOSSES.extend(round(float(entry["loss"]), 4) for entry in trainer.state.log_history if "loss" in entry)


def verl(folder: Path, liger: bool) -> None:
    """Its trainers want a GPU. What they do by `model.use_liger` on a rank: the engine makes the model; and, by
    `model.fused_kernel_options.impl_backend=liger`, the policy's log-probabilities and entropies."""
    from verl.utils.experimental.torch_functional import FusedLinearForPPO
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/verl{liger:d}", rank=0, world_size=1
    )
    config = LlamaConfig.from_pretrained(folder / "model")
    wanted = SimpleNamespace(
        model_type="language_model", hf_config=config, local_path=str(folder / "model"), use_liger=liger,
        trust_remote_code=False, fused_kernel_options=None, use_fused_kernels=False,
        enable_gradient_checkpointing=False,
    )  # fmt: skip
    engine = SimpleNamespace(
        model_config=wanted, engine_config=SimpleNamespace(model_dtype="float32", forward_only=False),
        device_mesh=None, use_remove_padding=False, ulysses_sequence_parallel_size=1,
    )  # fmt: skip
    model = FSDPEngine._build_module(engine)
    head = FusedLinearForPPO(impl_backend="liger" if liger else "torch")
    optimizer = torch.optim.AdamW(model.parameters(), LR)
    ids = torch.arange(3, 83).view(4, 20)
    for _ in range(2):
        hidden = model.model(ids).last_hidden_state
        log_probs, entropy = head(
            hidden[:, :-1].contiguous(), model.lm_head.weight, ids[:, 1:], temperature=0.7
        )
        loss = -log_probs.mean() - 0.01 * entropy.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        LOSSES.append(round(loss.item(), 4))
    torch.distributed.destroy_process_group()


TRAINERS: dict[str, Callable[[Path, bool], None]] = {
    "llamafactory": llama_factory,
    "ms-swift": ms_swift,
    "axolotl": axolotl,
    "verl": verl,
}


def main(name: str, folder: Path, liger: bool) -> None:
    saved(folder)
    TRAINERS[name](folder, liger)
    ours = None
    if liger:
        from liger_kernel.ops import LigerRMSNormFunction

        llama = import_module("transformers.models.llama.modeling_llama")
        ours = [LigerRMSNormFunction.__module__, llama.apply_rotary_pos_emb.__module__]
    print(json.dumps({"losses": LOSSES, "ours": ours}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "1")
