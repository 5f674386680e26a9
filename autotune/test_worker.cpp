// For tests: the real worker, as a program of its own.
#include <unistd.h>

#include "autotune/worker.hpp"

int main() { return wyvern::worker_main(STDIN_FILENO, STDOUT_FILENO); }
