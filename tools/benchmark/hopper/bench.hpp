// What the subjects share: their list, their rows, and how a kernel's own clocks become a figure.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tools/benchmark/hopper/gpu.hpp"

namespace wyvern::hopper {

/// One measured figure.
struct Row {
  std::string subject;
  std::string name;
  double value = 0;
  std::string unit;
  double spread_percent = 0;  ///< between the quartiles of repeated launches
  std::string expected;       ///< what the model of the chip says; empty where it says nothing
  std::string check;          ///< how the result was compared with the host's, and the outcome
  bool ok = true;
};

/// A figure and how far repeated measurements of it lie apart.
struct Sample {
  double median = 0;
  double spread_percent = 0;
};

Sample sample_of(std::vector<double> values);

/// Launches `run` repeatedly; each launch leaves in `clocks` one count for each of `blocks` blocks.
/// The figure is the median over the blocks, then over the launches.
Sample measure_clocks(const Memory& clocks, unsigned blocks, const std::function<void()>& run);

/// The same by events around a launch: milliseconds.
Sample measure_ms(const std::function<void()>& run);

/// Receives rows as they come.
using Report = std::function<void(Row)>;

struct Subject {
  std::string name;
  std::vector<Program> (*programs)();
  void (*run)(const Report& report);
};

/// All subjects, in the order in which they are measured.
const std::vector<Subject>& subjects();

std::vector<Program> special_function_programs();
void run_special_functions(const Report& report);
std::vector<Program> copy_programs();
void run_copies(const Report& report);
std::vector<Program> synchronization_programs();
void run_synchronization(const Report& report);
std::vector<Program> tensor_core_programs();
void run_tensor_cores(const Report& report);
std::vector<Program> inverse_programs();
void run_inverse(const Report& report);
std::vector<Program> gram_programs();
void run_gram(const Report& report);
std::vector<Program> launch_programs();
void run_launches(const Report& report);

/// Clocks a second of the multiprocessors while one computes, in GHz.
double measure_sm_clock_ghz();
std::vector<Program> clock_programs();

/// Uniform in [low, high), the same on every machine.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  float uniform(float low, float high);

 private:
  std::uint64_t state_;
};

/// Bits that look random; kernels have the same function.
std::uint32_t hash(std::uint32_t x);

std::uint16_t to_bf16(float value);
float from_bf16(std::uint16_t bits);

/// "within 1e-3 (3.2e-4)"; the row is not ok where `error` is beyond `bound` or not a number.
void set_check(Row& row, double error, double bound);

}  // namespace wyvern::hopper
