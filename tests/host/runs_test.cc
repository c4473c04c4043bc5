// What the devices of a process tell each other in a run (ffi/cuda/host/runs.h): a thread for each device. Ends with a
// line for every scenario that went as it should. Built and run by test_runs.py, under ThreadSanitizer.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cuda/host/runs.h"

namespace {

using jaxmoe::Run;
using jaxmoe::Runs;
using xla::ffi::Error;

constexpr int kDevices = 4;

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::exit(1);
}

template <class Device>
void on_all_devices(Device device) {
  std::vector<std::thread> threads;
  for (int number = 0; number < kDevices; ++number) threads.emplace_back([=] { device(number); });
  for (std::thread& thread : threads) thread.join();
}

void pause(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

auto waiting = [] { return Run::Start{Error::Success(), true}; };

void an_error_of_one_device_is_known_to_all() {
  Runs runs;
  on_all_devices([&](int number) {
    const std::shared_ptr<Run> run = runs.enter(1, number, waiting);
    pause(5 * number);
    run->leave(number == 3 ? Error::Internal("no memory") : Error::Success(), kDevices, 10);
    require(runs.find(1, number)->error().message() == "no memory", "the error is there when any device has left");
  });
}

void no_device_leaves_before_all_have_come() {
  Runs runs;
  std::atomic<int> entered = 0;
  on_all_devices([&](int number) {
    pause(20 * number);
    ++entered;
    const std::shared_ptr<Run> run = runs.enter(1, number, waiting);
    run->leave(Error::Success(), kDevices, 10);
    require(entered == kDevices, "all have entered when one leaves");
    require(run->error().success(), "nothing went wrong");
  });
}

void a_run_that_need_not_wait_does_not() {
  Runs runs;
  const std::shared_ptr<Run> run = runs.enter(1, 0, [] { return Run::Start{Error::Success(), false}; });
  run->leave(Error::Success(), kDevices, 1000);
  require(run->error().success(), "nothing went wrong");
}

void the_first_device_decides_for_all() {
  Runs runs;
  std::atomic<int> decisions = 0;
  on_all_devices([&](int number) {
    const std::shared_ptr<Run> run = runs.enter(1, number, [&] {
      ++decisions;
      return Run::Start{Error::Internal("failed before"), true};
    });
    require(run->is_refused() && run->error().message() == "failed before", "refused");
  });
  require(decisions == 1, "one decision");
}

void a_device_that_stays_away_is_an_error_of_the_others() {
  Runs runs;
  on_all_devices([&](int number) {
    if (number == 2) return;
    const std::shared_ptr<Run> run = runs.enter(1, number, waiting);
    run->leave(Error::Success(), kDevices, 0.2);
    require(run->error().message().find("3 of the 4 devices") != std::string::npos, "told who came");
  });
}

void time_counts_from_the_last_device_that_came_or_went() {
  Runs runs;
  on_all_devices([&](int number) {
    pause(300 * number);  // the last one later than the limit, but none that long behind the one before
    const std::shared_ptr<Run> run = runs.enter(1, number, waiting);
    run->leave(Error::Success(), kDevices, 0.6);
    require(run->error().success(), "nobody was too late");
  });
}

void a_device_that_goes_on_is_waited_for() {
  Runs runs;
  on_all_devices([&](int number) {
    const std::shared_ptr<Run> run = runs.enter(1, number, waiting);
    for (int sign = 0; number == 3 && sign < 5; ++sign) {  // longer than the limit, but never that long without one
      pause(200);
      run->goes_on();
    }
    run->leave(Error::Success(), kDevices, 0.6);
    require(run->error().success(), "nobody was given up");
  });
}

constexpr auto ready = [] { return Run::Start{Error::Success(), false}; };

void runs_are_apart_and_old_ones_are_forgotten() {
  Runs runs;
  runs.enter(1, 0, ready)->leave(Error::Internal("of the first run"), 1, 1);
  require(runs.enter(2, 0, ready)->error().success(), "another run has its own error");
  require(runs.find(1, 0)->error().failure(), "the first is still known");
  for (int64_t id = 3; id < 100; ++id) runs.enter(id, 0, ready);
  require(runs.find(1, 0) == nullptr && runs.find(99, 0) != nullptr, "the last ones are known");
}

void runs_without_numbers_are_told_apart_by_the_devices_that_begin_them() {
  Runs runs;
  runs.enter(-1, 0, ready)->leave(Error::Internal("of the first run"), 2, 1);
  runs.enter(-1, 0, ready);  // a device that is ahead
  require(runs.find(-1, 0)->error().success(), "its second run has no error");
  runs.enter(-1, 1, ready);
  require(runs.find(-1, 1)->error().failure(), "that of the first device is in the first run of the second one");
  runs.enter(-1, 1, ready);
  require(runs.find(-1, 1) == runs.find(-1, 0), "both are in their second run");
}

}  // namespace

int main() {
  an_error_of_one_device_is_known_to_all();
  no_device_leaves_before_all_have_come();
  a_run_that_need_not_wait_does_not();
  the_first_device_decides_for_all();
  a_device_that_stays_away_is_an_error_of_the_others();
  time_counts_from_the_last_device_that_came_or_went();
  a_device_that_goes_on_is_waited_for();
  runs_are_apart_and_old_ones_are_forgotten();
  runs_without_numbers_are_told_apart_by_the_devices_that_begin_them();
  std::puts("done");
}
