"""Integrations with other libraries, each registered by an explicit import or call; `import shippo_ssm` registers nothing.

- `import shippo_ssm.integrations.huggingface`: the Hugging Face model, registered with transformers' Auto classes.
- `shippo_ssm.integrations.trainer.ShippoTrainer`: a `transformers.Trainer` with the weight decay that our layers want.
- `shippo_ssm.integrations.peft.register()`: the default LoRA targets of the Hugging Face model.
- `shippo_ssm.integrations.mamba_ssm.MambaShippo`, `shippo_ssm.integrations.fla.FlaShippo`: the layer with their calls.
"""
