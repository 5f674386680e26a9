"""wyvern.flashinfer's decoding."""

import wyvern.flashinfer
from peers.adapters import counted

gated_delta_rule_decode = counted(wyvern.flashinfer.gated_delta_rule_decode)
gated_delta_rule_decode_pretranspose = counted(wyvern.flashinfer.gated_delta_rule_decode_pretranspose)
gated_delta_rule_mtp = counted(wyvern.flashinfer.gated_delta_rule_mtp)
