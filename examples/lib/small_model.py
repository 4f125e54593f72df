"""The small model of the examples that start and stop pretrain_gpt.py, as its flags."""

import shlex

SMALL_MODEL = shlex.split(
    "--model-family llama --num-layers 2 --hidden-size 64 --ffn-hidden-size 192 "
    "--num-attention-heads 4 --num-query-groups 2 --seq-length 64 --micro-batch-size 4 "
    "--lr 1e-3 --lr-decay-style cosine --eval-iters 0 --log-interval 10"
)
