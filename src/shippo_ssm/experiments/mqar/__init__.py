"""Transport-MQAR: the claim, its models, the training and scoring of recall models, and their figures."""
