"""Of a process that a launcher starts with this folder on its path: the stand-ins, before all
else."""

from tests.stock.stand_ins import install

install()
