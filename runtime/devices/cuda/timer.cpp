#include "runtime/devices/cuda/timer.hpp"

namespace wyvern::cuda {
namespace {

class CudaTimer final : public Timer {
 public:
  explicit CudaTimer(std::shared_ptr<PrimaryContext> context) : context_(std::move(context)) {
    const Current current(driver(), context_->context);
    check(driver().cuEventCreate(&start_, 0), "cuEventCreate");
    check(driver().cuEventCreate(&stop_, 0), "cuEventCreate");
  }
  ~CudaTimer() override {
    driver().cuEventDestroy(start_);
    driver().cuEventDestroy(stop_);
  }
  CudaTimer(const CudaTimer&) = delete;
  CudaTimer& operator=(const CudaTimer&) = delete;

  void start(Stream stream) override { record(start_, stream); }
  void stop(Stream stream) override { record(stop_, stream); }
  double elapsed_us() override {
    const Current current(driver(), context_->context);
    check(driver().cuEventSynchronize(stop_), "cuEventSynchronize");
    float milliseconds = 0;
    check(driver().cuEventElapsedTime(&milliseconds, start_, stop_), "cuEventElapsedTime");
    return milliseconds * 1e3;
  }

 private:
  const Driver& driver() const { return context_->driver; }
  void record(Event event, Stream stream) {
    const Current current(driver(), context_->context);
    check(driver().cuEventRecord(event, stream), "cuEventRecord");
  }

  std::shared_ptr<PrimaryContext> context_;
  Event start_ = nullptr;
  Event stop_ = nullptr;
};

class CudaReplay final : public Replay {
 public:
  CudaReplay(std::shared_ptr<PrimaryContext> context, Graph graph) : context_(std::move(context)) {
    const Result result = context_->driver.cuGraphInstantiateWithFlags(&exec_, graph, 0);
    context_->driver.cuGraphDestroy(graph);
    check(result, "cuGraphInstantiateWithFlags");
  }
  ~CudaReplay() override { context_->driver.cuGraphExecDestroy(exec_); }
  CudaReplay(const CudaReplay&) = delete;
  CudaReplay& operator=(const CudaReplay&) = delete;

  void launch(Stream stream) override {
    const Current current(context_->driver, context_->context);
    check(context_->driver.cuGraphLaunch(exec_, stream), "cuGraphLaunch");
  }

 private:
  std::shared_ptr<PrimaryContext> context_;
  GraphExec exec_ = nullptr;
};

}  // namespace

std::unique_ptr<Timer> make_timer(std::shared_ptr<PrimaryContext> context) {
  return std::make_unique<CudaTimer>(std::move(context));
}

std::shared_ptr<void> make_stream(const std::shared_ptr<PrimaryContext>& context) {
  const Current current(context->driver, context->context);
  StreamHandle stream = nullptr;
  check(context->driver.cuStreamCreate(&stream, kStreamNonBlocking), "cuStreamCreate");
  return {stream, [context](void* s) { context->driver.cuStreamDestroy(s); }};
}

std::unique_ptr<Replay> capture(const std::shared_ptr<PrimaryContext>& context,
                                const std::function<void(Stream)>& record) {
  const Driver& d = context->driver;
  const Current current(d, context->context);
  const std::shared_ptr<void> stream = make_stream(context);
  check(d.cuStreamBeginCapture(stream.get(), kCaptureModeThreadLocal), "cuStreamBeginCapture");
  Graph graph = nullptr;
  try {
    record(stream.get());
  } catch (...) {
    d.cuStreamEndCapture(stream.get(), &graph);
    if (graph != nullptr) d.cuGraphDestroy(graph);
    throw;
  }
  check(d.cuStreamEndCapture(stream.get(), &graph), "cuStreamEndCapture");
  return std::make_unique<CudaReplay>(context, graph);
}

}  // namespace wyvern::cuda
