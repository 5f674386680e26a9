// Time between events of a stream, and launches recorded in a graph.
#pragma once

#include <functional>
#include <memory>

#include "runtime/devices/cuda/context.hpp"
#include "runtime/devices/device_impl.hpp"

namespace wyvern::cuda {

std::unique_ptr<Timer> make_timer(std::shared_ptr<PrimaryContext> context);

/// A stream that does not wait for the default one.
std::shared_ptr<void> make_stream(const std::shared_ptr<PrimaryContext>& context);

/// Captures what `record` enqueues on the stream it is given.
std::unique_ptr<Replay> capture(const std::shared_ptr<PrimaryContext>& context,
                                const std::function<void(Stream)>& record);

}  // namespace wyvern::cuda
