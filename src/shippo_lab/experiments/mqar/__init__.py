"""Transport-MQAR: two experiments, their models, training, scoring and figures."""
