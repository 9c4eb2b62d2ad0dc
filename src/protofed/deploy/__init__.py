"""The methods between real machines, on Flower: same local training, same server, other wire.

Only the modules of this package import ``flwr``, which comes with the extra ``flower``.
"""
