"""Trainers that people already use, with one line more: the same numbers, under the budget."""

import warnings

import pytest
import torch

import leanstep
from leanstep.ir import Engine

transformers = pytest.importorskip("transformers")

STEPS = 4


def make_bert():
    config = transformers.BertConfig(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    torch.manual_seed(1)
    return transformers.BertForSequenceClassification(config)


def make_llama(words=97):
    config = transformers.LlamaConfig(
        vocab_size=words,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        attention_dropout=0.1,
    )
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(config)


def make_lora():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    return peft.get_peft_model(make_llama(), config)


def rows(model) -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 97, (64, 48), generator=generator)
    is_classifier = isinstance(model, transformers.BertForSequenceClassification)
    labels = tokens[:, 0] % 2 if is_classifier else tokens
    return [{"input_ids": t, "labels": label} for t, label in zip(tokens, labels, strict=True)]


def train(model, folder, callbacks=(), **settings) -> dict[str, torch.Tensor]:
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=8,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        seed=3,
        dataloader_pin_memory=False,
        **settings,
    )
    trainer = transformers.Trainer(
        model, arguments, train_dataset=rows(model), callbacks=list(callbacks)
    )
    with warnings.catch_warnings():
        # What the Trainer warns of is not ours.
        warnings.simplefilter("ignore")
        trainer.train()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(expected: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> None:
    assert [n for n, t in expected.items() if not torch.equal(t, got[n])] == []
    assert list(expected) == list(got)


ACCUMULATED, CHECKPOINTED = {"gradient_accumulation_steps": 2}, {"gradient_checkpointing": True}


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        *((make, {}) for make in (make_bert, make_llama, make_lora)),
        *((make, ACCUMULATED) for make in (make_bert, make_lora)),
        *((make, CHECKPOINTED) for make in (make_llama, make_lora)),
    ],
    # Of a function not its text, which names an address: processes that share tests compare them.
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_trainer_with_the_callback_trains_the_same_numbers(make, settings, tmp_path) -> None:
    from leanstep.integrations.transformers import LeanCallback

    expected = train(make(), tmp_path / "plain", **settings)
    callback = LeanCallback(budget="85%")
    model = make()

    got = train(model, tmp_path / "lean", [callback], **settings)

    assert_same(expected, got)
    assert any(d.engine is Engine.REPLAY for d in callback.lean.plan.decisions)
    callback.lean.remove()
    is_on = [getattr(module, "gradient_checkpointing", False) for module in model.modules()]
    assert any(is_on) == bool(settings.get("gradient_checkpointing"))


def make_talkative():
    return make_llama(words=4096)


@pytest.mark.parametrize(
    "settings",
    [{}, {"bf16": True, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5}],
    ids=str,
)
def test_trainer_computes_the_loss_in_chunks(settings, tmp_path) -> None:
    from leanstep.integrations.transformers import LeanCallback

    expected = train(make_talkative(), tmp_path / "plain", **settings)
    callback = LeanCallback(budget="75%")

    got = train(make_talkative(), tmp_path / "lean", [callback], **settings)

    assert_same(expected, got)
    lean = callback.lean
    assert lean.plan.loss is not None and lean._applied.rounds.window.runs > 0
    # With the loss as a whole there is hardly anything to win.
    whole = LeanCallback(budget="75%", chunks=False)
    with pytest.raises(leanstep.BudgetError):
        train(make_talkative(), tmp_path / "whole", [whole], **settings)


def test_trainer_that_compiles_trains_the_same_numbers(tmp_path) -> None:
    from leanstep.integrations.transformers import LeanCallback

    compiles = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    expected = train(make_llama(), tmp_path / "plain")
    callback = LeanCallback(budget="85%")

    got = train(make_llama(), tmp_path / "lean", [callback], **compiles)

    assert_same(expected, got)
    assert any(d.engine is Engine.REPLAY for d in callback.lean.plan.decisions)
    assert "the model is compiled as a whole" in " ".join(str(callback.lean).split())


def test_checkpointing_that_others_switched_on_is_taken_over(tmp_path) -> None:
    from leanstep.integrations.transformers import LeanCallback

    expected = train(make_llama(), tmp_path / "plain")
    model = make_llama()
    model.gradient_checkpointing_enable()
    callback = LeanCallback(budget="85%")

    assert_same(expected, train(model, tmp_path / "lean", [callback]))
    assert not any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
    assert callback.lean.profile.company == ()


def test_second_training_keeps_the_plan_and_budget_errors_reach_the_user(tmp_path) -> None:
    from leanstep.integrations.transformers import LeanCallback

    model, callback = make_bert(), LeanCallback(budget="90%")
    train(model, tmp_path / "first", [callback])
    plan = callback.lean.plan
    train(model, tmp_path / "second", [callback])
    assert callback.lean.plan is plan

    with pytest.raises(leanstep.BudgetError, match="There: "):
        train(make_bert(), tmp_path / "small", [LeanCallback(budget=1000)])


def test_loop_with_accelerate_trains_the_same_numbers() -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

    def run(is_lean: bool) -> dict[str, torch.Tensor]:
        model = make_llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        batches = torch.utils.data.DataLoader(rows(model), batch_size=8)
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
        model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
        if is_lean:
            lean = leanstep.lean(accelerator.unwrap_model(model), optimizer, budget="85%")
        torch.manual_seed(4)
        for batch in batches:
            accelerator.backward(model(**batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert not is_lean or lean.plan.changed
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        return dict(accelerator.unwrap_model(model).state_dict())

    assert_same(run(False), run(True))


def lightning_module(host):
    class Module(host.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_llama()

        def training_step(self, batch, _):
            return self.model(**batch).loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    return Module()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_lightning_callback_trains_the_same_numbers(tmp_path, accumulate: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        host = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
        from leanstep.integrations.lightning import LeanCallback

    def run(callbacks) -> dict[str, torch.Tensor]:
        module = lightning_module(host)
        batches = torch.utils.data.DataLoader(rows(module.model), batch_size=8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = host.Trainer(
                accelerator="cpu",
                max_steps=STEPS,
                callbacks=callbacks,
                accumulate_grad_batches=accumulate,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                default_root_dir=str(tmp_path),
            )
            torch.manual_seed(4)
            trainer.fit(module, batches)
        return dict(module.state_dict())

    callback = LeanCallback(budget="85%")
    assert_same(run([]), run([callback]))
    assert callback.lean.plan.changed
