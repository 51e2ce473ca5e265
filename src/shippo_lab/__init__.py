"""The evidence for SHiPPO; the library is `shippo_ssm`, which never imports this package.

`tasks` makes data, `theory` checks the paper's statements, `experiments` has one module or folder per table, `harness`
runs experiments and shows their results, `cli` is the command `shippo`.
"""
