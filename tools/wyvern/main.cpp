#include <string_view>

#include "tools/wyvern/command.hpp"
#ifdef WYVERN_TUNER
#include "autotune/worker.hpp"
#include "tools/wyvern/worker.hpp"
#endif

int main(int argc, char** argv) {
  using namespace wyvern::cli;
#ifdef WYVERN_TUNER
  // The tuner's worker process speaks its own protocol and is no verb for people.
  if (argc == 2 && argv[1] == kWorkerArgument) return wyvern::worker_main(0, 1);
#endif
  Command command;
  add_devices(command);
  add_stages(command);
  add_example(command);
  add_run(command);
#ifdef WYVERN_TUNER
  add_tune(command);
#endif
  add_bench(command);
  add_compile(command);
  add_cache(command);
  return command.run(argc, argv);
}
