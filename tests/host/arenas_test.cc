// The arenas of a process (ffi/cuda/host/arenas.cc, arena.cc, gpu.cc, meeting.cc) beside GPUs that are made up here: they
// compute nothing, are busy as long as a scenario wants, and have as much memory. Other ranks say what this one says. Runs
// the scenario that is named and ends with a line where it went as it should. Built and run by test_arenas.py.
#include "cuda/host/arena.cc"
#include "cuda/host/arenas.cc"
#include "cuda/host/gpu.cc"
#include "cuda/host/meeting.cc"
#include "cuda/host/symmetric_memory.cc"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>
#include <map>
#include <string>
#include <thread>

namespace {

using namespace jaxmoe;

constexpr int kDevices = 4;
constexpr std::size_t kMiB = std::size_t{1} << 20;

void require(bool holds, const char* what, const std::string& found = "") {
  if (holds) return;
  std::fprintf(stderr, "not so: %s %s\n", what, found.c_str());
  std::exit(1);
}

// The GPUs.
std::atomic<bool> is_busy = false;           // nothing that was enqueued has ended
std::atomic<int> records_until_full = -1;    // who enqueues the next record of an event waits; negative: nobody
std::atomic<bool> host_memory_waits = false;
std::atomic<bool> is_full = false;
std::atomic<int> waiting_threads = 0;        // for one of the last two
std::atomic<std::size_t> free_bytes = 64 * kMiB;
std::atomic<bool> has_context[kDevices] = {};

// What other ranks are: those of `group_ranks` neighbours, in one process.
int32_t group_ranks = 1;
std::atomic<int> meetings = 0;
std::atomic<uint64_t> restarts = 0;  // of the processes
std::atomic<bool> they_come = true;  // to a meeting

// Of a thread: the device that it has chosen, and the context of one, which comes first.
thread_local int chosen_device = 0;
thread_local intptr_t pushed_context = 0;  // device + 1; 0: none

int device_in_use() { return pushed_context != 0 ? static_cast<int>(pushed_context) - 1 : chosen_device; }
void use_device() { has_context[device_in_use()] = true; }

void wait_while(const std::atomic<bool>& holds) {
  if (!holds) return;
  ++waiting_threads;
  while (holds) std::this_thread::yield();
  --waiting_threads;
}

CUresult current_context(CUcontext* context) {
  use_device();
  *context = reinterpret_cast<CUcontext>(static_cast<intptr_t>(device_in_use() + 1));
  return CUDA_SUCCESS;
}
CUresult push_context(CUcontext context) {
  pushed_context = reinterpret_cast<intptr_t>(context);
  return CUDA_SUCCESS;
}
CUresult pop_context(CUcontext* context) {
  *context = reinterpret_cast<CUcontext>(pushed_context);
  pushed_context = 0;
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  const std::map<std::string, void*> all{{"cuCtxGetCurrent", reinterpret_cast<void*>(current_context)},
                                         {"cuCtxPushCurrent", reinterpret_cast<void*>(push_context)},
                                         {"cuCtxPopCurrent", reinterpret_cast<void*>(pop_context)}};
  *function = all.at(name);
  *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = device_in_use();
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {  // makes a context, since CUDA 12
  chosen_device = device;
  use_device();
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  use_device();
  *event = reinterpret_cast<cudaEvent_t>(1);
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t) {
  use_device();
  return is_busy ? cudaErrorNotReady : cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaEventQuery(nullptr); }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) {
  if (records_until_full-- == 0) is_full = true;
  wait_while(is_full);
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t*, unsigned, int) { return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int*, int*) { return cudaSuccess; }
cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  if (bytes > free_bytes) return cudaErrorMemoryAllocation;
  *memory = std::malloc(1);
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned) {
  wait_while(host_memory_waits);
  *memory = std::calloc(1, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void*, int, std::size_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaMemcpyAsync(void*, const void*, std::size_t, cudaMemcpyKind, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaMemcpy(void*, const void*, std::size_t, cudaMemcpyKind) { return cudaSuccess; }
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* all) {
  *free = *all = free_bytes;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  *properties = {};
  properties->uuid.bytes[0] = static_cast<char>(device);
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "out of memory"; }
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) { return cudaSuccess; }
cudaError_t cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, unsigned) { return cudaSuccess; }
cudaError_t cudaIpcCloseMemHandle(void*) { return cudaSuccess; }
}

namespace jaxmoe {

// XLA's communicator, and the other ranks.
std::string membership(const Link&, Membership* found) {
  *found = {group_ranks, chosen_device % group_ranks, chosen_device};
  return "";
}
std::string exchange(Board*, const Link& link, const Note& own, std::vector<Note>* notes) {
  ++meetings;
  if (!they_come) return "Not all ranks came.";
  notes->assign(link.ranks, own);
  for (int32_t rank = 0; rank < link.ranks; ++rank) {
    (*notes)[rank].gpu[0] = static_cast<unsigned char>(chosen_device / link.ranks * link.ranks + rank);
    (*notes)[rank].block.process += restarts;
  }
  return "";
}

// Kernels.
std::string make_launch(const RankParams&, Pass, const Formats&, const LaunchArrays&, std::byte*, ReadyLaunch*) {
  return "";
}
int32_t timeline_blocks(const LaunchSizes&) { return 0; }
cudaError_t enqueue(const ReadyLaunch&, cudaStream_t) { return cudaSuccess; }

}  // namespace jaxmoe

namespace {

Link link_of(int32_t ranks) {
  Link link{};
  link.ranks = ranks;
  link.timeout_seconds = 0.2;
  return link;
}

// A forward call, or the backward one of the same layer, which needs more memory.
LaunchSizes sizes(int32_t ranks, bool backward = false) {
  Schedule schedule{};
  schedule.tile = {128, 128, 256};
  schedule.unit_tiles = schedule.lag_units = 1;
  schedule.ring_tiles = backward ? 64 : 8;
  schedule.segment_tiles = backward ? 4 : 0;
  schedule.workers = schedule.dispatchers = 66;
  schedule.chunk_rows = 8;
  schedule.narrow_rows = 64;
  const Shape shape{
      .ranks = ranks, .tokens = 1024, .hidden = 2048, .intermediate = 2048, .num_experts = 8, .top_k = 2, .projections = 2};
  return {shape, schedule, Formats::of(Element::kBf16), backward ? Pass::kBackward : Pass::kForward};
}

ArenaCall call_of(const LaunchSizes& sizes) {
  ArenaCall call{};
  call.sizes = sizes;
  call.arrays = LayerArrays<void, float>{};
  call.timeout_seconds = 1;
  return call;
}

std::string error_of(const ffi::Error& error) { return error.success() ? "" : error.message(); }

// The arena of every device, as a program over groups of so many of them finds it.
std::vector<Arena*> find_arenas(int32_t ranks) {
  std::vector<int64_t> devices(kDevices);
  for (int device = 0; device < kDevices; ++device) devices[device] = device;
  group_ranks = ranks;
  std::vector<Arena*> arenas;
  for (int device = 0; device < kDevices; ++device) {
    cudaSetDevice(device);
    ffi::ErrorOr<Arena*> found = find_arena(device, link_of(ranks), devices);
    require(!found.has_error(), "an arena is found", found.has_error() ? found.error().message() : "");
    require((*found)->rank() == device % ranks, "it is that of the rank");
    require(error_of((*found)->reserve(link_of(ranks), sizes(ranks))).empty(), "it has room");
    arenas.push_back(*found);
  }
  return arenas;
}

void groups_of_the_same_devices_have_arenas_of_their_own(int32_t first, int32_t second) {
  const std::vector<Arena*> arenas = find_arenas(first), others = find_arenas(second);
  const int before = meetings;
  require(find_arenas(first) == arenas && find_arenas(second) == others, "each program finds its own again");
  require(meetings == before, "nobody meets for that");
  for (Arena* arena : arenas) require(std::ranges::find(others, arena) == others.end(), "no arena is of both");
}

void groups_of_2_and_then_of_4() { groups_of_the_same_devices_have_arenas_of_their_own(2, 4); }
void groups_of_4_and_then_of_2() { groups_of_the_same_devices_have_arenas_of_their_own(4, 2); }
void groups_of_1_and_then_of_2() { groups_of_the_same_devices_have_arenas_of_their_own(1, 2); }

// After JAX has begun anew, with the same processes or with others.
void groups_meet_again_when_names_are_forgotten() {
  const std::vector<Arena*> arenas = find_arenas(2);
  const int before = meetings;
  forget_names();
  require(find_arenas(2) == arenas, "the same ranks have the same arenas");
  require(meetings == before + kDevices, "each has met its group");
  restarts = 1;
  forget_names();
  for (Arena* arena : find_arenas(2)) {
    require(std::ranges::find(arenas, arena) == arenas.end(), "other processes have others");
  }
}

void an_arena_is_for_groups_of_its_size() {
  Arena arena(0, 4, 1);
  require(error_of(arena.reserve(link_of(2), sizes(2))).find("an arena of 4 ranks was found for a call of 2") !=
              std::string::npos,
          "another group is refused");
  require(meetings == 0, "and meets nobody");
}

// Longer than the limit, which is of what ranks say to each other.
void earlier_work_is_waited_for(int32_t ranks) {
  group_ranks = ranks;
  Arena arena(0, ranks, 0);
  is_busy = true;
  int signs = 0;
  std::thread work([] {
    std::this_thread::sleep_for(std::chrono::milliseconds(700));
    is_busy = false;
  });
  Link link = link_of(ranks);
  link.goes_on = [&] { ++signs; };
  const std::string error = error_of(arena.reserve(link, sizes(ranks)));
  work.join();
  require(error.empty(), "the call goes on behind it", error);
  require(Gpu::of(0).failure().empty(), "the GPU is used again", Gpu::of(0).failure());
  require(failures().empty() && process_failure().success(), "nothing has failed");
  require(signs >= 2, "the other devices hear that this one goes on");
}

void earlier_work_of_one_rank_is_waited_for() { earlier_work_is_waited_for(1); }
void earlier_work_of_several_ranks_is_waited_for() { earlier_work_is_waited_for(2); }

// What is waited for may be the collective of a meeting to which not all have come.
void a_wait_for_earlier_work_ends_when_the_gpu_is_given_up() {
  Arena arena(0, 1, 0);
  is_busy = true;
  they_come = false;
  std::thread meets([] {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    std::vector<Note> notes;
    Gpu::of(0).exchange(link_of(2), {}, &notes);
  });
  const std::string error = error_of(arena.reserve(link_of(1), sizes(1)));
  meets.join();
  require(error.find("another call has failed on this GPU") != std::string::npos, "it is told", error);
  require(process_failure().failure(), "and every later call is");
}

// A kernel on the second GPU, while a thread asks that has used none.
void asking_for_progress_makes_no_context() {
  std::thread([] {
    cudaSetDevice(1);
    Arena arena(1, 1, 0);
    require(error_of(arena.reserve(link_of(1), sizes(1))).empty(), "there is room");
    is_busy = true;
    require(error_of(arena.launch(call_of(sizes(1)))).empty(), "it is launched");
  }).join();
  require(has_context[1] && !has_context[0], "only the second GPU is in use");
  const std::vector<LaunchProgress> busy = Gpu::progress();
  require(busy.size() == 1 && busy[0].enqueued == 1 && busy[0].waiting == 1, "the launch has not ended");
  is_busy = false;
  require(Gpu::progress()[0].waiting == 0, "it has ended");
  require(!has_context[0], "the first GPU is still not in use");
  int device = 0;
  cudaGetDevice(&device);
  require(device == 0, "nor is another device the current one of the thread that asked");
}

template <class Ask>
void require_an_answer(Ask ask, const char* what) {
  std::future<void> answer = std::async(std::launch::async, ask);
  if (answer.wait_for(std::chrono::seconds(5)) == std::future_status::ready) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::_Exit(1);  // not through the future, which would wait
}

// Whatever asks how things are has the answer while one thread waits for a GPU.
void require_answers() {
  require_an_answer([] { Gpu::progress(); }, "how far launches are is known");
  require_an_answer([] { Gpu::of(2); }, "another GPU is found");
  require_an_answer([] { failures(); }, "what has failed is known");
  require_an_answer([] { (void)process_failure(); }, "calls hear of it");
}

void nobody_waits_for_a_launch_that_waits_for_room_in_a_stream() {
  group_ranks = 1;
  ffi::ErrorOr<Arena*> arena = find_arena(0, link_of(1), {});
  require(error_of((*arena)->reserve(link_of(1), sizes(1))).empty(), "there is room");
  for (const int passed : {0, 1}) {
    records_until_full = passed;
    std::thread launches([&] { require(error_of((*arena)->launch(call_of(sizes(1)))).empty(), "it is launched"); });
    while (waiting_threads == 0) std::this_thread::yield();
    require_answers();
    is_full = false;
    launches.join();
  }
  require(Gpu::progress()[0].enqueued == 2, "both launches are counted");
}

void nobody_waits_for_memory_of_the_host() {
  host_memory_waits = true;
  std::thread grows([] {
    ffi::ErrorOr<Arena*> arena = find_arena(0, link_of(1), {});
    require(error_of((*arena)->reserve(link_of(1), sizes(1))).empty(), "there is room");
  });
  while (waiting_threads == 0) std::this_thread::yield();
  require_answers();
  host_memory_waits = false;
  grows.join();
}

void a_small_call_says_what_a_large_one_lacked() {
  Arena arena(0, 1, 0);
  require(error_of(arena.reserve(link_of(1), sizes(1))).empty(), "there is room for the forward call");
  const std::string lacked = error_of(arena.reserve(link_of(1), sizes(1, true)));
  require(lacked.find("of GPU memory outside of XLA's pool") != std::string::npos, "not for the backward call", lacked);
  const std::string told = error_of(arena.launch(call_of(sizes(1))));
  require(told == lacked, "the forward call, which comes first, says so:", told);
  require(error_of(arena.reserve(link_of(1), sizes(1))).empty(), "smaller calls go on");
  require(error_of(arena.launch(call_of(sizes(1)))).empty(), "and run");
  require(error_of(arena.launch(call_of(sizes(1, true)))).find("without an initialize") != std::string::npos,
          "what was said is forgotten by then");
}

}  // namespace

int main(int count, char** arguments) {
  const std::map<std::string, void (*)()> scenarios{
#define SCENARIO(name) {#name, name}
      SCENARIO(groups_of_2_and_then_of_4),
      SCENARIO(groups_of_4_and_then_of_2),
      SCENARIO(groups_of_1_and_then_of_2),
      SCENARIO(groups_meet_again_when_names_are_forgotten),
      SCENARIO(an_arena_is_for_groups_of_its_size),
      SCENARIO(earlier_work_of_one_rank_is_waited_for),
      SCENARIO(earlier_work_of_several_ranks_is_waited_for),
      SCENARIO(a_wait_for_earlier_work_ends_when_the_gpu_is_given_up),
      SCENARIO(asking_for_progress_makes_no_context),
      SCENARIO(nobody_waits_for_a_launch_that_waits_for_room_in_a_stream),
      SCENARIO(nobody_waits_for_memory_of_the_host),
      SCENARIO(a_small_call_says_what_a_large_one_lacked),
  };
  require(count == 2 && scenarios.contains(arguments[1]), "a scenario is named");
  scenarios.at(arguments[1])();
  std::puts("done");
}
