"""None of it is an operator of Wyvern."""

from peers.adapters import missing_from

__getattr__ = missing_from(__name__)
