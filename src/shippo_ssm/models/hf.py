"""The Hugging Face model; importing it registers the model with transformers' Auto classes."""

from shippo_ssm.integrations.huggingface import ShippoCacheLayer, ShippoConfig, ShippoForCausalLM, ShippoModel

__all__ = ["ShippoCacheLayer", "ShippoConfig", "ShippoForCausalLM", "ShippoModel"]
