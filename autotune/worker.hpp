// The process that candidates run in, and the protocol between it and the tuner.
//
// One JSON document a line, requests on one descriptor, replies on the other, one request at a
// time. A worker ends when its input does, and is killed with its parent.
//
//   {"open":{"device":"cuda:0","problem":{...},"cache":"/dir","seed":1}}
//     -> {"ready":true} | {"error":"one sentence","kind":"input"|"unavailable"}
//     Opens the device, builds the tensors, runs the float64 oracle on the reduced problem. Once,
//     first.
//   {"measure":{"plan":[{"template":"fwd_h.cpu","config":"BT=64"},...],"step":3,"bar_us":12.5,
//               "repeats":4}}
//     -> {"status":"ok","detail":"","samples_us":[...],"error":0.001,"clock_mhz":1980,
//         "compiled":0}
//     Checks the plan on the reduced problem, then times step 3 alone. The status is "ok", "wrong",
//     "rejected" (clearly slower than bar_us, 0: no bar), "failed" (did not compile), "illegal"
//     (cannot be launched), or "crashed": the device reports a fault and the worker ends after this
//     reply. "error" is null when an output holds a NaN or an infinity.
//     A sample is the mean of `repeats` launches; 0: as many as the step needs.
//   {"race":{"plans":[[...],...],"step":3,"repeats":4,"seconds":0.5}}
//     -> {"plans":[...],"compiled":0} as for "compare"
//     Times step 3 of each plan, all measured before, in turn.
//   {"compare":{"plans":[[...],...],"seconds":4.0}}
//     -> {"at":0}, {"at":1}, ... before plan 0, 1, ... is prepared, checked or first run, then
//     -> {"plans":[{"status":"ok","detail":"","samples_us":[...],"error":0.001},...],"compiled":0}
//     Times the whole operator by each plan, in turn, for about that many seconds.
#pragma once

namespace wyvern {

/// Serves requests until `in_fd` ends; returns the process's exit code. For a program that does
/// nothing else: if out_fd is 1, standard output belongs to the protocol.
int worker_main(int in_fd, int out_fd);

}  // namespace wyvern
