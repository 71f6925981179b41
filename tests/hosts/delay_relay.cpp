// A switch between network namespaces that delays every packet, for kernels without netem: one tun
// device in each namespace, packets forwarded by the last byte of their IPv4 destination.
// usage: delay_relay DELAY_MS NAMESPACE...   (host i of the list is 10.77.0.i, its device net0)
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

struct Packet {
  Clock::time_point due;
  size_t to;
  std::vector<char> bytes;
};

int open_device(const std::string& name_space) {
  const int target = open(("/var/run/netns/" + name_space).c_str(), O_RDONLY | O_CLOEXEC);
  if (target < 0 || setns(target, CLONE_NEWNET) != 0) return -1;
  close(target);
  const int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  if (device < 0) return -1;
  ifreq request{};
  request.ifr_flags = IFF_TUN | IFF_NO_PI;
  std::strncpy(request.ifr_name, "net0", IFNAMSIZ - 1);
  return ioctl(device, TUNSETIFF, &request) == 0 ? device : -1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: delay_relay DELAY_MS NAMESPACE NAMESPACE...\n");
    return 2;
  }
  const auto delay = std::chrono::microseconds(static_cast<int64_t>(std::atof(argv[1]) * 1000));
  std::vector<pollfd> devices;
  for (int i = 2; i < argc; ++i) {
    const int device = open_device(argv[i]);
    if (device < 0) {
      std::perror(argv[i]);
      return 1;
    }
    devices.push_back({device, POLLIN, 0});
  }
  std::printf("ready\n");
  std::fflush(stdout);

  std::deque<Packet> queue;  // by due time, since the delay is the same for all
  std::vector<char> buffer(65536);
  while (true) {
    timespec timeout{1, 0};
    if (!queue.empty()) {
      const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(
          std::max(queue.front().due - Clock::now(), Clock::duration::zero()));
      timeout = {left.count() / 1000000000, left.count() % 1000000000};
    }
    if (ppoll(devices.data(), devices.size(), &timeout, nullptr) < 0) return 1;
    for (const pollfd& device : devices) {
      if ((device.revents & POLLIN) == 0) continue;
      ssize_t size = 0;
      while ((size = read(device.fd, buffer.data(), buffer.size())) > 0) {
        const bool ipv4 = size >= 20 && (buffer[0] >> 4) == 4;
        const auto host = ipv4 ? static_cast<size_t>(static_cast<unsigned char>(buffer[19])) : 0;
        if (host >= 1 && host <= devices.size())
          queue.push_back({Clock::now() + delay, host - 1, {buffer.begin(), buffer.begin() + size}});
      }
    }
    for (; !queue.empty() && queue.front().due <= Clock::now(); queue.pop_front()) {
      const Packet& packet = queue.front();
      // A full queue drops the packet, as a link would.
      if (write(devices[packet.to].fd, packet.bytes.data(), packet.bytes.size()) < 0 &&
          errno != EAGAIN && errno != ENETDOWN && errno != EIO)
        return 1;
    }
  }
}
