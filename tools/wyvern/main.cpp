#include <fcntl.h>

#include <csignal>
#include <cstdlib>
#include <exception>
#include <new>
#include <string_view>

#include "autotune/worker.hpp"
#include "tools/wyvern/command.hpp"
#include "tools/wyvern/worker.hpp"

namespace {

/// A standard descriptor that the caller closed would be given to the next file that is opened, and
/// printed text would go into that file. So it is replaced by a descriptor that fails like a closed
/// one: /dev/null opened for the opposite direction. If even that cannot be opened nothing else
/// can.
void hold_standard_descriptors() {
  for (const int number : {0, 1, 2})
    if (fcntl(number, F_GETFD) < 0) open("/dev/null", number == 0 ? O_WRONLY : O_RDONLY);
}

using namespace wyvern::cli;

std::terminate_handler other_end = nullptr;

/// A lack of memory that meets a destructor (the JSON library's allocate) or the end of a thread
/// cannot be caught. Nothing is half done by then that another process could see.
void end_without_memory() {
  try {
    if (const std::exception_ptr error = std::current_exception()) std::rethrow_exception(error);
  } catch (const std::bad_alloc&) {
    std::_Exit(report_no_memory(0, nullptr));
  } catch (...) {  // another defect, which is to be seen as one
  }
  other_end();
}

int run(int argc, char** argv) {
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
  add_precompile(command);
  add_cache(command);
  add_report(command);
  add_manual(command);
  return command.run(argc, argv);
}

}  // namespace

int main(int argc, char** argv) {
  hold_standard_descriptors();
  // A write beyond the limit of a file's size is an error like that of a full disk.
  std::signal(SIGXFSZ, SIG_IGN);
  other_end = std::set_terminate(end_without_memory);
  try {
    return run(argc, argv);
  } catch (const std::exception&) {  // not even for the words that say so
    return report_no_memory(argc, argv);
  }
}
