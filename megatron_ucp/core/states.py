"""The two states that every engine has a name for. Those of optimizers are in
`formats/optimizers`."""

MASTER = "fp32"  # the name of the master weights among the states of a buffer
VALUE = "value"  # the one state of frozen parameters and module buffers
