// A collective for scripts that load the engine without TensorFlow, beside runtime/c_api.cc.

#include <cstring>
#include <future>
#include <utility>

#include "runtime/engine.h"

// Sums `values` over the ranks, in place. Returns the Code; `message` gets at most message_size
// bytes of the reason.
extern "C" int engine_sum(float* values, int count, char* message, int message_size) {
  ddl::TensorBuffer buffer;
  buffer.in = buffer.out = values;
  buffer.count = count;
  buffer.dims = {count};
  ddl::Request request;
  request.op_name = "AllReduceN";
  request.name = "total";
  request.tensors.push_back(buffer);
  std::promise<ddl::Status> finished;
  request.done = [&finished](const ddl::Status& status) { finished.set_value(status); };
  ddl::Engine::Get().Submit(std::move(request));
  const ddl::Status status = finished.get_future().get();
  std::strncpy(message, status.message().c_str(), message_size - 1);
  message[message_size - 1] = '\0';
  return static_cast<int>(status.code());
}
