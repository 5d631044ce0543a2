// A device of torch, for `PrivateUse1`: two devices, whose memory the host cannot read, with streams, events and
// generators of their own.
//
// Each stream is a thread. Memory is mapped twice: what tensors point to may not be touched, so that a process which
// reads it without a copy ends with SIGSEGV; kernels use the other mapping. A copy to the host does not wait, even where
// the memory is not pinned. What is freed is overwritten in the order of the stream that frees it, as if it was used
// again there. Other operations run on the CPU, between copies.
//
// What Python needs besides torch's own API are the operators `torch.ops.open_device`.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace {

constexpr int kDevices = 2;
constexpr size_t kBytes = size_t{1} << 30, kAlignment = 512;
constexpr unsigned char kFreed = 0xAB;

// ---- streams and events --------------------------------------------------------------------------------------------

struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = true;
  std::chrono::steady_clock::time_point at;

  void finish() {
    std::lock_guard<std::mutex> lock(mutex);
    done = true;
    at = std::chrono::steady_clock::now();
    changed.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return done; });
  }
};

using EventPtr = std::shared_ptr<Event>;

class Queue {
 public:
  void launch(std::function<void()> kernel) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!has_thread_) {  // not before it is used: a process that only has the library may fork
      has_thread_ = true;
      std::thread([this] { run(); }).detach();
    }
    kernels_.push_back(std::move(kernel));
    changed_.notify_all();
  }
  EventPtr record() {
    auto event = std::make_shared<Event>();
    record(event);
    return event;
  }
  void record(const EventPtr& event) {
    event->done = false;
    launch([event] { event->finish(); });
  }
  void wait() { record()->wait(); }
  bool is_idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return kernels_.empty();
  }

 private:
  void run() {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return !kernels_.empty(); });
      auto kernel = kernels_.front();
      lock.unlock();
      kernel();
      kernel = nullptr;
      lock.lock();
      kernels_.pop_front();  // after it has ended: until then the stream is not idle
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> kernels_;
  bool has_thread_ = false;
};

std::vector<std::unique_ptr<Queue>>& queues() {  // never destroyed: threads use them until the process ends
  static auto* all = [] {
    auto* found = new std::vector<std::unique_ptr<Queue>>();
    found->reserve(10000);
    for (int i = 0; i < kDevices; i++) found->push_back(std::make_unique<Queue>());
    return found;
  }();
  return *all;
}
std::mutex queues_mutex;

thread_local c10::DeviceIndex current_device = 0;
thread_local c10::StreamId current_streams[kDevices] = {0, 0};  // 0: the default one

Queue& queue_of(c10::DeviceIndex device, c10::StreamId id) { return *queues()[id == 0 ? device : id]; }
Queue& queue_of(const c10::Stream& stream) { return queue_of(stream.device_index(), stream.id()); }
Queue& current_queue(c10::DeviceIndex device) { return queue_of(device, current_streams[device]); }

bool is_used = false;

// ---- memory --------------------------------------------------------------------------------------------------------

class Memory {
 public:
  Memory() {
    const int fd = memfd_create("open_device", 0);
    TORCH_CHECK(fd >= 0 && ftruncate(fd, kBytes) == 0, "no memory for the device");
    alias_ = static_cast<char*>(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
    base_ = static_cast<char*>(mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    close(fd);
    TORCH_CHECK(alias_ != MAP_FAILED && base_ != MAP_FAILED, "no memory for the device");
    free_[0] = kBytes;
  }
  void* allocate(size_t size) {
    size = std::max(kAlignment, (size + kAlignment - 1) / kAlignment * kAlignment);
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto [at, room] : free_) {
      if (room < size) continue;
      free_.erase(at);
      if (room > size) free_[at + size] = room - size;
      sizes_[at] = size;
      used_ += size;
      most_ = std::max(most_, used_);
      return base_ + at;
    }
    throw std::bad_alloc();
  }
  void release(void* pointer, Queue& queue) {
    const size_t at = static_cast<char*>(pointer) - base_;
    queue.launch([this, at] {
      std::lock_guard<std::mutex> lock(mutex_);
      const size_t size = sizes_.at(at);
      std::memset(alias_ + at, kFreed, size);
      sizes_.erase(at);
      used_ -= size;
      auto next = free_.lower_bound(at);
      auto own = free_.emplace_hint(next, at, size);
      if (next != free_.end() && at + size == next->first) {
        own->second += next->second;
        free_.erase(next);
      }
      if (own != free_.begin()) {
        auto before = std::prev(own);
        if (before->first + before->second == at) {
          before->second += own->second;
          free_.erase(own);
        }
      }
    });
  }
  bool has(const void* pointer) const { return pointer >= base_ && pointer < base_ + kBytes; }
  void* readable(const void* pointer) const { return alias_ + (static_cast<const char*>(pointer) - base_); }
  // The most that was used at one time.
  size_t most() {
    std::lock_guard<std::mutex> lock(mutex_);
    return most_;
  }

 private:
  char *alias_, *base_;
  std::mutex mutex_;
  std::map<size_t, size_t> free_, sizes_;
  size_t used_ = 0, most_ = 0;
};

Memory& memory(c10::DeviceIndex device) {
  is_used = true;
  static auto* all = new std::unique_ptr<Memory>[kDevices];
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  if (!all[device]) all[device] = std::make_unique<Memory>();
  return *all[device];
}

void free_on_device(void* context) {
  for (c10::DeviceIndex device = 0; device < kDevices; device++) {
    if (memory(device).has(context)) memory(device).release(context, current_queue(device));
  }
}

struct DeviceAllocator final : at::Allocator {
  at::DataPtr allocate(size_t size) override {
    const c10::Device device(c10::DeviceType::PrivateUse1, current_device);
    if (size == 0) return {nullptr, nullptr, &free_on_device, device};
    void* found = memory(current_device).allocate(size);
    return {found, found, &free_on_device, device};
  }
  at::DeleterFnPtr raw_deleter() const override { return &free_on_device; }
  void copy_data(void* target, const void* source, size_t count) const override {
    auto& own = memory(current_device);
    current_queue(current_device).wait();
    std::memcpy(own.readable(target), own.readable(source), count);
  }
};
DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &device_allocator);

std::map<void*, size_t>& pinned() {
  static auto* all = new std::map<void*, size_t>();
  return *all;
}
std::mutex pinned_mutex;

struct PinnedAllocator final : at::Allocator {
  static void release(void* pointer) {
    // Not given back: a copy may still be writing there, and what follows is to be seen by tests, not by malloc.
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned().erase(pointer);
  }
  at::DataPtr allocate(size_t size) override {
    void* found = std::aligned_alloc(64, (size + 64) / 64 * 64);
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned()[found] = size;
    return {found, found, &release, c10::Device(c10::DeviceType::CPU)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t count) const override { std::memcpy(target, source, count); }
};
PinnedAllocator pinned_allocator;

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto after = pinned().upper_bound(const_cast<void*>(pointer));
  if (after == pinned().begin()) return false;
  auto found = std::prev(after);
  return static_cast<const char*>(pointer) < static_cast<char*>(found->first) + found->second;
}

// ---- what torch asks of a device -----------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Device = c10::Device;
  using Stream = c10::Stream;
  static Device at(c10::DeviceIndex index) { return {c10::DeviceType::PrivateUse1, index}; }

  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  Device getDevice() const override { return at(current_device); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "open_device:", int(device.index()), " is no device");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  Device exchangeDevice(Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  Stream getStream(Device device) const override {
    const auto index = device.has_index() ? device.index() : current_device;
    return Stream(Stream::UNSAFE, at(index), current_streams[index]);
  }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getNewStream(Device device, int) const override {
    std::lock_guard<std::mutex> lock(queues_mutex);
    queues().push_back(std::make_unique<Queue>());
    return Stream(
        Stream::UNSAFE, at(device.has_index() ? device.index() : current_device), int64_t(queues().size()) - 1);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    const auto before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const Stream& stream) const override { return queue_of(stream).is_idle(); }
  void synchronizeStream(const Stream& stream) const override { queue_of(stream).wait(); }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    std::vector<EventPtr> ends;
    {
      std::lock_guard<std::mutex> lock(queues_mutex);
      for (auto& queue : queues())
        if (!queue->is_idle()) ends.push_back(queue->record());
    }
    for (auto& end : ends) end->wait();
  }

  static Event& event(void* pointer) { return **static_cast<EventPtr*>(pointer); }
  void record(void** pointer, const Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*pointer == nullptr) *pointer = new EventPtr();
    auto& event = *static_cast<EventPtr*>(*pointer);
    event = std::make_shared<Event>();  // who waits for what was recorded before goes on with that
    queue_of(stream).record(event);
  }
  void block(void* pointer, const Stream& stream) const override {
    if (pointer == nullptr) return;
    queue_of(stream).launch([event = *static_cast<EventPtr*>(pointer)] { event->wait(); });
  }
  bool queryEvent(void* pointer) const override {
    if (pointer == nullptr) return true;
    std::lock_guard<std::mutex> lock(event(pointer).mutex);
    return event(pointer).done;
  }
  void synchronizeEvent(void* pointer) const override {
    if (pointer != nullptr) event(pointer).wait();
  }
  void destroyEvent(void* pointer, const c10::DeviceIndex) const noexcept override {
    delete static_cast<EventPtr*>(pointer);
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    TORCH_CHECK(queryEvent(begin) && queryEvent(end), "the events have not happened");
    return std::chrono::duration<double, std::milli>(event(end).at - event(begin).at).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// A generator whose numbers are drawn by one of the CPU.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex device)
      : Generator(device, at::detail::createCPUGenerator(c10::default_rng_seed_val + device)) {}
  Generator(c10::DeviceIndex device, at::Generator own)
      : GeneratorImpl(Guard::at(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), own_(std::move(own)) {}
  void set_current_seed(uint64_t seed) override { own_.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { own_.set_offset(offset); }
  uint64_t get_offset() const override { return own_.get_offset(); }
  uint64_t current_seed() const override { return own_.current_seed(); }
  uint64_t seed() override { return own_.seed(); }
  void set_state(const c10::TensorImpl& state) override { own_.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return own_.unsafeGetGeneratorImpl()->get_state(); }
  GeneratorImpl* clone_impl() const override { return new Generator(device_.index(), own_.clone()); }
  at::Generator own_;
};

at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* all = [] {
    auto* found = new std::vector<at::Generator>();
    for (int i = 0; i < kDevices; i++) found->push_back(at::make_generator<Generator>(i));
    return found;
  }();
  return all->at(device < 0 ? current_device : device);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return is_used; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = device; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice(Guard::at(device)).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current_device : device);
  }
  at::Device getDeviceFromPtr(void* pointer) const override { return Guard::at(memory(0).has(pointer) ? 0 : 1); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    const auto before = Guard().exchangeDevice(storage.device());
    auto found = device_allocator.allocate(size);
    const auto count = std::min(size, storage.nbytes());
    if (count > 0) device_allocator.copy_data(found.get(), storage.data(), count);
    storage.set_data_ptr_noswap(std::move(found));
    storage.set_nbytes(size);
    Guard().setDevice(before);
  }
};

const bool has_hooks = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

// ---- operators -----------------------------------------------------------------------------------------------------

struct WithDevice {
  explicit WithDevice(c10::DeviceIndex device) : before(current_device) {
    if (device >= 0) Guard().setDevice(Guard::at(device));
  }
  ~WithDevice() { current_device = before; }
  c10::DeviceIndex before;
};

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  WithDevice with(device ? device->index() : -1);
  return at::detail::empty_generic(
      size, &device_allocator, kKeys, dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype())), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  WithDevice with(device ? device->index() : -1);
  return at::detail::empty_strided_generic(
      size, stride, &device_allocator, kKeys, dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype())));
}

// What a kernel sees: the tensor's elements, in memory that may be used.
at::Tensor in_kernel(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor.detach();
  if (tensor.numel() == 0) return at::empty(tensor.sizes(), tensor.options().device(at::kCPU));
  void* memory_ = memory(tensor.device().index()).readable(tensor.const_data_ptr());
  auto found = at::from_blob(memory_, tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
  found._set_conj(tensor.is_conj());
  found._set_neg(tensor.is_neg());
  return found;
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const auto device = target.is_cpu() ? source.device().index() : target.device().index();
  auto& queue = current_queue(device);
  const bool is_between = !source.is_cpu() && !target.is_cpu();
  if (is_between && source.device() != target.device()) {
    auto ready = current_queue(source.device().index()).record();
    queue.launch([ready] { ready->wait(); });
  }
  queue.launch([from = in_kernel(source), to = in_kernel(target)]() mutable { to.copy_(from); });
  if (is_between && source.device() != target.device()) {
    auto done = queue.record();
    current_queue(source.device().index()).launch([done] { done->wait(); });
  }
  const bool may_go_on = is_between || (non_blocking && (target.is_cpu() || is_pinned(source.const_data_ptr())));
  if (!may_go_on) queue.wait();
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (target.sizes() != source.sizes()) target.resize_(source.sizes());
  return copy_from(source, target, false);
}

// A few that training does in place, as kernels: the host does not wait for them.
at::Tensor& added(at::Tensor& self, const at::Tensor& other, const at::Scalar& alpha) {
  if (other.device() != self.device() && other.dim() > 0) {
    const auto moved = other.to(self.device());
    return added(self, moved, alpha);
  }
  current_queue(self.device().index()).launch([to = in_kernel(self), other = in_kernel(other), alpha]() mutable {
    to.add_(other, alpha);
  });
  return self;
}
at::Tensor& filled(at::Tensor& self, const at::Scalar& value) {
  current_queue(self.device().index()).launch([to = in_kernel(self), value]() mutable { to.fill_(value); });
  return self;
}
at::Tensor& zeroed(at::Tensor& self) { return filled(self, 0); }

// Drawn by the device's own generator.
template <typename Draw>
at::Tensor& drawn(at::Tensor& self, const std::optional<at::Generator>& generator, Draw draw) {
  auto chosen = generator.value_or(default_generator(self.device().index()));
  auto numbers = at::empty(self.sizes(), self.options().device(at::kCPU));
  draw(numbers, static_cast<Generator*>(chosen.unsafeGetGeneratorImpl())->own_);
  return self.copy_(numbers);
}
at::Tensor& uniform_(at::Tensor& self, double from, double to, std::optional<at::Generator> generator) {
  return drawn(self, generator, [&](auto& numbers, auto& own) { numbers.uniform_(from, to, own); });
}
at::Tensor& normal_(at::Tensor& self, double mean, double std, std::optional<at::Generator> generator) {
  return drawn(self, generator, [&](auto& numbers, auto& own) { numbers.normal_(mean, std, own); });
}
at::Tensor& bernoulli_(at::Tensor& self, double p, std::optional<at::Generator> generator) {
  return drawn(self, generator, [&](auto& numbers, auto& own) { numbers.bernoulli_(p, own); });
}

std::tuple<at::Tensor, at::Tensor> dropped(const at::Tensor& self, double p, std::optional<bool> train) {
  auto mask = at::empty(self.sizes(), self.options().dtype(at::kBool));
  bernoulli_(mask, train.value_or(true) ? 1 - p : 1, std::nullopt);
  return {train.value_or(true) ? self.mul(mask).mul(1 / (1 - p)) : self.clone(), mask};
}

at::Tensor& set_(at::Tensor& self, at::Storage source) {
  const int64_t count = int64_t(source.nbytes() / self.dtype().itemsize());
  return at::native::set_storage_cpu_(self, std::move(source), 0, {count}, {});
}

const at::Tensor& resized(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  const auto needed =
      at::detail::computeStorageNbytesContiguous(size, self.dtype().itemsize(), size_t(self.storage_offset()));
  if (needed > self.storage().nbytes()) Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("resize_", &resized);
  m.impl("set_.source_Storage", &set_);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("add_.Tensor", &added);
  m.impl("fill_.Scalar", &filled);
  m.impl("zero_", &zeroed);
  m.impl("uniform_", &uniform_);
  m.impl("normal_", &normal_);
  m.impl("bernoulli_.float", &bernoulli_);
  m.impl("native_dropout", &dropped);
}

// Copies are of tensors as they are. Otherwise torch would copy them first.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

// ---- what tests ask ------------------------------------------------------------------------------------------------

std::map<int64_t, EventPtr>& holds() {
  static auto* all = new std::map<int64_t, EventPtr>();
  return *all;
}

// Let a stream stand, from here on, until it is released. Returns a number for `release`.
int64_t hold(int64_t device, int64_t stream) {
  auto event = std::make_shared<Event>();
  event->done = false;
  queue_of(c10::DeviceIndex(device), stream).launch([event] { event->wait(); });
  const auto number = int64_t(holds().size());
  holds()[number] = event;
  return number;
}
void release(int64_t number) { holds().at(number)->finish(); }

TORCH_LIBRARY(open_device, m) {
  m.def("is_used", [] { return is_used; });
  m.def("rng_state", [] { return default_generator(current_device).get_state(); });
  m.def("set_rng_state", [](const at::Tensor& state) { default_generator(current_device).set_state(state); });
  m.def("manual_seed", [](int64_t seed) { default_generator(current_device).set_current_seed(uint64_t(seed)); });
  m.def("most_bytes", [](int64_t device) { return int64_t(memory(c10::DeviceIndex(device)).most()); });
  m.def("hold", &hold);
  m.def("release", &release);
}

}  // namespace
