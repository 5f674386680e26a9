// CUDA C++ that every program of the microbenchmarks begins with: one function for each
// instruction.
#pragma once

#include <string>

namespace wyvern::hopper {

/// Clocks, mbarriers, tensor copies, shared-memory matrices, mma.sync.
const std::string& device_code();

enum class Operand { registers, shared };
enum class Element { bf16, tf32 };

/// A function `void wgmma(float (&d)[n/2], const u32 (&a)[4], u64 b)`, or `(.., u64 a, u64 b)`
/// where A is in shared memory: d += A·B^T for one step of k (16 for bf16, 8 for tf32), both
/// row-major.
std::string wgmma_function(int n, Operand a, Element element);

}  // namespace wyvern::hopper
