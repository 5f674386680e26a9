#include <string_view>

#include "autotune/worker.hpp"
#include "tools/wyvern/command.hpp"
#include "tools/wyvern/worker.hpp"

int main(int argc, char** argv) {
  using namespace wyvern::cli;
  // The tuner's worker process speaks its own protocol and is no verb for people.
  if (argc == 2 && argv[1] == kWorkerArgument) return wyvern::worker_main(0, 1);
  Command command;
  add_devices(command);
  add_stages(command);
  add_example(command);
  add_run(command);
  add_verify(command);
  add_tune(command);
  add_bench(command);
  add_compile(command);
  add_cache(command);
  return command.run(argc, argv);
}
