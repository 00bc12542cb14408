/* A scripted libnvidia-ml.so.1: answers what a monitoring process asks of NVML, as a text file says.
 *
 * In: the script named by NVML_SCRIPT, read again whenever it is another file; see scripted.py, which writes it.
 * Out: NVML's answers, and with NVML_LOG a line per call: function, GPU, MIG device, thread, monotonic milliseconds.
 * State: what nvmlInit saw; everything else is the script and the clock, so that processes agree on counters.
 * Source: the signatures and layouts of NVIDIA's nvml.h 13, as the nvidia-ml-py bindings call them.
 *
 * Built with -DOLD it is a driver of about 2021, without the newer symbols. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef unsigned long long ull;
typedef unsigned int uint;
typedef int status;

enum {
  SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
  TIMEOUT = 10, GPU_IS_LOST = 15, OUT_OF_MEMORY = 20, NO_DATA = 21, VERSION_MISMATCH = 25
};

enum { EMPTY = 10000 }; /* the script's word for: succeed, and fill nothing in */
enum { GPUS = 64, SLOTS = 8, SETTINGS = 1024, RULES = 256, PROCESSES = 1024, XIDS = 4096, ANY = -1, NONE = -1 };

#define NOT_AVAILABLE 0xFFFFFFFFFFFFFFFFull
#define NO_INSTANCE 0xFFFFFFFFu
#define ALL_LINKS 0xFFFFFFFFu

/* -- what the script says ----------------------------------------------------------------------------------------- */

struct setting { int gpu; char key[40], text[104]; };
struct rule { int gpu; char function[64]; double seconds; int code; };
struct process { int gpu; char kind[12]; uint pid; ull bytes; uint sm, memory, encoder, decoder, gi, ci; };
struct mig { int present; uint gi, ci; char profile[24], uuid[72]; ull total, used; };
struct xid { int gpu; ull code; uint gi, ci; };

static struct world {
  int gpus, driver, lost[GPUS], settings, hangs, fails, processes, xids, no_process_is_success;
  struct setting setting[SETTINGS];
  struct rule hang[RULES], fail[RULES];
  struct process process[PROCESSES];
  struct mig mig[GPUS][SLOTS];
  struct xid xid[XIDS];
} world;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char script[4096];
static struct stat seen;
static int log_file = -1, opened, users, counted;

static int parse_rest(struct world *w, const char *line) {
  struct process p = {0};
  struct mig m = {.present = 1};
  struct xid x;
  int gpu, slot;
  if (sscanf(line, "process %d %11s %u %llu %u %u %u %u %u %u", &p.gpu, p.kind, &p.pid, &p.bytes, &p.sm, &p.memory,
             &p.encoder, &p.decoder, &p.gi, &p.ci) == 10 && w->processes < PROCESSES)
    return w->process[w->processes++] = p, 1;
  if (sscanf(line, "mig %d %d %u %u %23s %llu %llu %71s", &gpu, &slot, &m.gi, &m.ci, m.profile, &m.total, &m.used,
             m.uuid) == 8 && gpu >= 0 && gpu < GPUS && slot >= 0 && slot < SLOTS)
    return w->mig[gpu][slot] = m, 1;
  if (sscanf(line, "xid %d %llu %u %u", &x.gpu, &x.code, &x.gi, &x.ci) == 4 && w->xids < XIDS)
    return w->xid[w->xids++] = x, 1;
  return 0;
}

static int parse_line(struct world *w, const char *line) {
  struct setting s;
  struct rule r = {0};
  int gpu;
  if (sscanf(line, "gpus %d", &w->gpus) == 1) return w->gpus >= 0 && w->gpus <= GPUS;
  if (sscanf(line, "driver %d", &w->driver) == 1) return 1;
  if (sscanf(line, "no_process_is_success %d", &w->no_process_is_success) == 1) return 1;
  if (sscanf(line, "lost %d", &gpu) == 1 && gpu >= 0 && gpu < GPUS) return w->lost[gpu] = 1;
  if (sscanf(line, "set %d %39s %103[^\n]", &s.gpu, s.key, s.text) == 3 && w->settings < SETTINGS)
    return w->setting[w->settings++] = s, 1;
  if (sscanf(line, "hang %d %63s %lf", &r.gpu, r.function, &r.seconds) == 3 && w->hangs < RULES)
    return w->hang[w->hangs++] = r, 1;
  if (sscanf(line, "fail %d %63s %d", &r.gpu, r.function, &r.code) == 3 && w->fails < RULES)
    return w->fail[w->fails++] = r, 1;
  return parse_rest(w, line);
}

static void read_script(void) {
  static struct world next;
  char line[512];
  FILE *file = fopen(script, "re");
  if (!file) return;
  memset(&next, 0, sizeof next);
  while (fgets(line, sizeof line, file))
    if (!parse_line(&next, line)) fprintf(stderr, "scripted NVML: can't read %s", line);
  fclose(file);
  world = next;
}

static void refresh(void) {
  struct stat now;
  if (stat(script, &now)) return;
  if (now.st_ino == seen.st_ino && now.st_mtim.tv_sec == seen.st_mtim.tv_sec &&
      now.st_mtim.tv_nsec == seen.st_mtim.tv_nsec && now.st_size == seen.st_size)
    return;
  seen = now;
  read_script();
}

static void open_files(const char *script_path, const char *log_path) {
  snprintf(script, sizeof script, "%s", script_path ? script_path : "");
  memset(&seen, 0, sizeof seen);
  memset(&world, 0, sizeof world);
  if (log_file >= 0) close(log_file);
  log_file = log_path && *log_path ? open(log_path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644) : -1;
  opened = 1;
}

/* For a process that has it loaded already: another script, and NVML as in a new process. */
void scripted_open(const char *script_path, const char *log_path) {
  pthread_mutex_lock(&lock);
  users = counted = 0;
  open_files(script_path, log_path);
  pthread_mutex_unlock(&lock);
}

/* -- values ------------------------------------------------------------------------------------------------------- */

static double clock_s(clockid_t which) {
  struct timespec t;
  clock_gettime(which, &t);
  return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static ull now_us(void) { return (ull)(clock_s(CLOCK_REALTIME) * 1e6); }

static const char *setting(int gpu, const char *key) {
  for (int i = world.settings - 1; i >= 0; i--)
    if ((world.setting[i].gpu == gpu || world.setting[i].gpu == ANY) && !strcmp(world.setting[i].key, key))
      return world.setting[i].text;
  return NULL;
}

static ull number(int gpu, const char *key, ull otherwise) {
  const char *text = setting(gpu, key);
  if (!text) return otherwise;
  return *text == '-' ? (ull)strtoll(text, NULL, 0) : strtoull(text, NULL, 0);
}

/* A counter that runs at a rate per second since the machine started. */
static ull counter(int gpu, const char *rate_key, ull rate) {
  return (ull)((double)number(gpu, rate_key, rate) * clock_s(CLOCK_MONOTONIC));
}

static ull memory_free(int gpu);

static ull value(int gpu, const char *key) {
  ull i = (ull)gpu;
  const struct { const char *key; ull value; } table[] = {
      {"minor", i}, {"persistence_mode", 1}, {"mig_mode", 0},
      {"utilization_gpu", 40 + 7 * i % 60}, {"utilization_memory", 20 + 5 * i % 60},
      {"utilization_encoder", i % 5}, {"utilization_decoder", 1 + i % 5},
      {"memory_total", 80ull << 30}, {"memory_reserved", 600ull << 20}, {"memory_used", (4 + i) << 30},
      {"power_mw", 300000 + 10000 * i}, {"power_instant_mw", 300000 + 10000 * i}, {"power_limit_mw", 700000},
      {"power_default_limit_mw", 700000}, {"power_min_limit_mw", 200000}, {"power_max_limit_mw", 750000},
      {"vgpu_supported", 1}, {"vgpu_licensed", i % 2},
      {"temperature", 40 + i}, {"memory_temperature", 50 + i},
      {"graphics_clock_mhz", 1980 - i}, {"sm_clock_mhz", 1965 - i}, {"memory_clock_mhz", 2619}, {"video_clock_mhz", 1545},
      {"max_graphics_clock_mhz", 1985}, {"max_sm_clock_mhz", 1980}, {"max_memory_clock_mhz", 2620}, {"max_video_clock_mhz", 1550},
      {"clock_event_reasons", 0}, {"fan_speed", 30 + i}, {"performance_state", 0}, {"pcie_replays", i},
      {"ecc_corrected_volatile", i}, {"ecc_uncorrected_volatile", 0}, {"ecc_corrected_aggregate", 10 + i},
      {"ecc_uncorrected_aggregate", 1},
      {"rows_correctable", i % 3}, {"rows_uncorrectable", 0}, {"row_remap_pending", 0}, {"row_remap_failure", 0},
      {"retired_single_bit", 0}, {"retired_double_bit", 0}, {"retired_pending", 0},
      {"throttled_power_ns", 1000000 * i}, {"throttled_thermal_ns", 0}, {"throttled_ns", 0},
  };
  if (!strcmp(key, "memory_free")) return number(gpu, key, memory_free(gpu));
  if (!strcmp(key, "energy_mj")) return number(gpu, key, counter(gpu, "energy_rate_mw", value(gpu, "power_mw")));
  if (!strcmp(key, "pcie_tx_bytes")) return number(gpu, key, counter(gpu, "pcie_tx_rate", 1000000 * (i + 1)));
  if (!strcmp(key, "nvlink_tx_kib")) return number(gpu, key, counter(gpu, "nvlink_tx_rate", 3000 * (i + 1)));
  if (!strcmp(key, "nvlink_rx_kib")) return number(gpu, key, counter(gpu, "nvlink_rx_rate", 2000 * (i + 1)));
  if (!strcmp(key, "pcie_rx_bytes")) return number(gpu, key, counter(gpu, "pcie_rx_rate", 500000 * (i + 1)));
  for (size_t n = 0; n < sizeof table / sizeof *table; n++)
    if (!strcmp(table[n].key, key)) return number(gpu, key, table[n].value);
  return number(gpu, key, 0);
}

static ull memory_free(int gpu) {
  return value(gpu, "memory_total") - value(gpu, "memory_reserved") - value(gpu, "memory_used");
}

static void default_text(int gpu, const char *key, char *text, size_t size) {
  if (!strcmp(key, "uuid")) snprintf(text, size, "GPU-5c41b7ed-0000-4000-8000-%012x", gpu);
  else if (!strcmp(key, "name")) snprintf(text, size, "NVIDIA H100 80GB HBM3");
  else if (!strcmp(key, "serial")) snprintf(text, size, "16500230%05d", gpu);
  else if (!strcmp(key, "vbios")) snprintf(text, size, "96.00.74.00.01");
  else if (!strcmp(key, "pci_bus_id")) snprintf(text, size, "00000000:%02X:00.0", 0x0A + gpu);
  else if (!strcmp(key, "driver_version")) snprintf(text, size, "580.95.05");
  else snprintf(text, size, "?");
}

static void text_of(int gpu, const char *key, char *text, size_t size) {
  const char *set = setting(gpu, key);
  if (set) snprintf(text, size, "%s", set);
  else default_text(gpu, key, text, size);
}

static status put_text(const char *text, char *out, uint length) {
  if (!out) return INVALID_ARGUMENT;
  if (strlen(text) + 1 > length) return INSUFFICIENT_SIZE;
  return strcpy(out, text), SUCCESS;
}

static status put(uint *out, ull number) { return out ? (*out = (uint)number, SUCCESS) : INVALID_ARGUMENT; }

static status put_long(ull *out, ull number) { return out ? (*out = number, SUCCESS) : INVALID_ARGUMENT; }

/* -- a call: the script read again, the log, hangs, errors, and the lock until it ends ---------------------------- */

struct handle { int gpu, slot; };
static struct handle gpu_handle[GPUS], mig_handle[GPUS][SLOTS];
struct call { status code; int gpu, slot; struct mig *mig; };

static int matches(const struct rule *rule, const char *function, int gpu) {
  size_t length = strlen(rule->function);
  if (rule->gpu != ANY && rule->gpu != gpu) return 0;
  if (!strcmp(rule->function, "*")) return 1;
  if (strncmp(rule->function, function, length)) return 0;
  const char *rest = function + length;
  return !*rest || !strcmp(rest, "WithFlags") || (rest[0] == '_' && rest[1] == 'v' && rest[2] >= '0' && rest[2] <= '9');
}

static double hang_s(const char *function, int gpu) {
  for (int i = 0; i < world.hangs; i++)
    if (matches(&world.hang[i], function, gpu)) return world.hang[i].seconds;
  return 0;
}

static status failure(const char *function, int gpu) {
  for (int i = world.fails - 1; i >= 0; i--)
    if (matches(&world.fail[i], function, gpu)) return world.fail[i].code;
  return SUCCESS;
}

static void write_log(const char *function, int gpu, int slot) {
  char line[160];
  if (log_file < 0) return;
  int length = snprintf(line, sizeof line, "%s %d %d %ld %.0f\n", function, gpu, slot, (long)syscall(SYS_gettid),
                        clock_s(CLOCK_MONOTONIC) * 1e3);
  if (write(log_file, line, (size_t)length) < 0) log_file = -1;
}

static void sleep_ms(long ms) {
  struct timespec rest = {ms / 1000, ms % 1000 * 1000000};
  while (nanosleep(&rest, &rest) && errno == EINTR) {}
}

/* Hangs as long as the script says, without the lock; ends early where the script no longer says so. */
static void hang(const char *function, int gpu) {
  double began = clock_s(CLOCK_MONOTONIC);
  while (clock_s(CLOCK_MONOTONIC) - began < hang_s(function, gpu)) {
    pthread_mutex_unlock(&lock);
    sleep_ms(10);
    pthread_mutex_lock(&lock);
    refresh();
  }
}

static void enter(const char *function, int gpu, int slot) {
  pthread_mutex_lock(&lock);
  if (!opened) open_files(getenv("NVML_SCRIPT"), getenv("NVML_LOG"));
  refresh();
  write_log(function, gpu, slot);
  hang(function, gpu);
}

static status state_of(int gpu) {
  if (!users) return UNINITIALIZED;
  if (gpu == NONE) return SUCCESS;
  if (gpu < 0 || gpu >= counted) return INVALID_ARGUMENT;
  return world.lost[gpu] || gpu >= world.gpus ? GPU_IS_LOST : SUCCESS;
}

static struct call begin(const char *function, int gpu, int slot) {
  enter(function, gpu, slot);
  struct call call = {.gpu = gpu, .slot = slot, .code = state_of(gpu)};
  if (!call.code) call.code = failure(function, gpu);
  if (!call.code && slot != NONE) {
    call.mig = &world.mig[gpu][slot];
    if (!call.mig->present) call.code = INVALID_ARGUMENT; /* a handle that outlived its instance */
  }
  return call;
}

static struct call begin_device(const char *function, const struct handle *device) {
  size_t at = (size_t)((const char *)device - (const char *)gpu_handle);
  size_t mig_at = (size_t)((const char *)device - (const char *)mig_handle);
  if (at < sizeof gpu_handle) return begin(function, (int)(at / sizeof *device), NONE);
  if (mig_at < sizeof mig_handle) {
    int n = (int)(mig_at / sizeof *device);
    return begin(function, n / SLOTS, n % SLOTS);
  }
  struct call call = begin(function, NONE, NONE);
  call.code = users ? INVALID_ARGUMENT : UNINITIALIZED;
  return call;
}

static void end(struct call *call) {
  (void)call;
  pthread_mutex_unlock(&lock);
}

#define CALL(what) \
  __attribute__((cleanup(end), unused)) struct call call = what; \
  if (call.code) return call.code == EMPTY ? SUCCESS : call.code

#define DEVICE_CALL CALL(begin_device(__func__, device))
/* What only a whole GPU answers. */
#define GPU_CALL DEVICE_CALL; if (call.mig) return NOT_SUPPORTED
/* What neither a MIG device answers nor a GPU that is cut into them. */
#define UNCUT_CALL GPU_CALL; if (value(call.gpu, "mig_mode")) return NOT_SUPPORTED

typedef const struct handle *device_t;

#define UINT_OF_GPU(function, key) \
  status function(device_t device, uint *out) { GPU_CALL; return put(out, value(call.gpu, key)); }

/* -- library and system ------------------------------------------------------------------------------------------- */

static status initialise(const char *function) {
  enter(function, NONE, NONE);
  status code = world.driver ? world.driver : failure(function, NONE);
  if (!code && users++ == 0) counted = world.gpus;
  pthread_mutex_unlock(&lock);
  return code;
}

status nvmlInitWithFlags(uint flags) { return (void)flags, initialise(__func__); }
status nvmlInit_v2(void) { return initialise(__func__); }
status nvmlInit(void) { return initialise(__func__); }

status nvmlShutdown(void) {
  CALL(begin(__func__, NONE, NONE));
  users--;
  return SUCCESS;
}

const char *nvmlErrorString(status code) {
  static const char *const words[] = {
      "Success", "Uninitialized", "Invalid Argument", "Not Supported", "Insufficient Permissions",
      "Already Initialized", "Not Found", "Insufficient Size", "Insufficient External Power",
      "Driver Not Loaded", "Timeout", "Interrupt Request Issue", "NVML Shared Library Not Found",
      "Function Not Found", "Corrupted infoROM", "GPU is lost", "GPU requires restart",
      "The operating system has blocked the request.", "RM has detected an NVML/RM version mismatch.",
  };
  return code >= 0 && (size_t)code < sizeof words / sizeof *words ? words[code] : "Unknown Error";
}

status nvmlSystemGetDriverVersion(char *out, uint length) {
  char text[104];
  CALL(begin(__func__, NONE, NONE));
  text_of(ANY, "driver_version", text, sizeof text);
  return put_text(text, out, length);
}

status nvmlSystemGetNVMLVersion(char *out, uint length) {
  CALL(begin(__func__, NONE, NONE));
  return put_text("13.580.95.05", out, length);
}

static status cuda_version(const char *function, int *out) {
  CALL(begin(function, NONE, NONE));
  return *out = (int)number(ANY, "cuda_driver_version", 13000), SUCCESS;
}

status nvmlSystemGetCudaDriverVersion(int *out) { return cuda_version(__func__, out); }
status nvmlSystemGetCudaDriverVersion_v2(int *out) { return cuda_version(__func__, out); }

status nvmlSystemGetProcessName(uint pid, char *out, uint length) {
  char text[32];
  CALL(begin(__func__, NONE, NONE));
  snprintf(text, sizeof text, "process-%u", pid);
  return put_text(text, out, length);
}

/* -- devices and who they are ------------------------------------------------------------------------------------- */

status nvmlDeviceGetCount_v2(uint *out) {
  CALL(begin(__func__, NONE, NONE));
  return put(out, (ull)counted);
}

status nvmlDeviceGetHandleByIndex_v2(uint index, const struct handle **out) {
  CALL(begin(__func__, index < GPUS ? (int)index : GPUS, NONE));
  return *out = &gpu_handle[index], SUCCESS;
}

static void uuid_of(int gpu, const struct mig *mig, char *text, size_t size) {
  if (mig) snprintf(text, size, "%s", mig->uuid);
  else text_of(gpu, "uuid", text, size);
}

static const struct handle *by_uuid(const char *uuid) {
  char text[104];
  for (int gpu = 0; gpu < counted; gpu++) {
    uuid_of(gpu, NULL, text, sizeof text);
    if (!strcmp(text, uuid)) return &gpu_handle[gpu];
    for (int slot = 0; slot < SLOTS; slot++)
      if (world.mig[gpu][slot].present && !strcmp(world.mig[gpu][slot].uuid, uuid)) return &mig_handle[gpu][slot];
  }
  return NULL;
}

/* As documented, one lost GPU is enough for it to find none. */
status nvmlDeviceGetHandleByUUID(const char *uuid, const struct handle **out) {
  CALL(begin(__func__, NONE, NONE));
  for (int gpu = 0; gpu < counted; gpu++)
    if (state_of(gpu)) return GPU_IS_LOST;
  *out = by_uuid(uuid);
  return *out ? SUCCESS : NOT_FOUND;
}

status nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, const struct handle **out) {
  char text[104];
  CALL(begin(__func__, NONE, NONE));
  for (int gpu = 0; gpu < counted; gpu++) {
    text_of(gpu, "pci_bus_id", text, sizeof text);
    if (!strcasecmp(text, bus_id)) return *out = &gpu_handle[gpu], state_of(gpu);
  }
  return NOT_FOUND;
}

status nvmlDeviceGetUUID(device_t device, char *out, uint length) {
  char text[104];
  DEVICE_CALL;
  uuid_of(call.gpu, call.mig, text, sizeof text);
  return put_text(text, out, length);
}

status nvmlDeviceGetName(device_t device, char *out, uint length) {
  char text[104], whole[144];
  DEVICE_CALL;
  text_of(call.gpu, "name", text, sizeof text);
  snprintf(whole, sizeof whole, call.mig ? "%s MIG %s" : "%s", text, call.mig ? call.mig->profile : "");
  return put_text(whole, out, length);
}

static status text_call(struct call *call, const char *key, char *out, uint length) {
  char text[104];
  text_of(call->gpu, key, text, sizeof text);
  return put_text(text, out, length);
}

status nvmlDeviceGetSerial(device_t device, char *out, uint length) {
  GPU_CALL;
  return text_call(&call, "serial", out, length);
}

status nvmlDeviceGetVbiosVersion(device_t device, char *out, uint length) {
  GPU_CALL;
  return text_call(&call, "vbios", out, length);
}

status nvmlDeviceGetIndex(device_t device, uint *out) {
  DEVICE_CALL;
  return put(out, (ull)(call.mig ? call.slot : call.gpu));
}

UINT_OF_GPU(nvmlDeviceGetMinorNumber, "minor")
UINT_OF_GPU(nvmlDeviceGetPersistenceMode, "persistence_mode")

struct pci { char legacy[16]; uint domain, bus, device, id, subsystem; char bus_id[32]; };

status nvmlDeviceGetPciInfo_v3(device_t device, struct pci *out) {
  char text[104];
  GPU_CALL;
  memset(out, 0, sizeof *out);
  text_of(call.gpu, "pci_bus_id", text, sizeof text);
  sscanf(text, "%x:%x:%x", &out->domain, &out->bus, &out->device);
  snprintf(out->bus_id, sizeof out->bus_id, "%.31s", text);
  snprintf(out->legacy, sizeof out->legacy, "%.12s", strlen(text) > 4 ? text + 4 : text);
  out->id = 0x233010DE;
  return SUCCESS;
}

/* -- what NVIDIA's device plugin asks for besides ------------------------------------------------------------------ */

enum { TOPOLOGY_SYSTEM = 50 };

status nvmlDeviceGetCudaComputeCapability(device_t device, int *major, int *minor) {
  GPU_CALL;
  return *major = 9, *minor = 0, SUCCESS;
}

status nvmlDeviceGetTopologyCommonAncestor(device_t device, device_t other, uint *level) {
  GPU_CALL;
  (void)other;
  return put(level, TOPOLOGY_SYSTEM);
}

status nvmlDeviceGetNvLinkState(device_t device, uint link, uint *active) {
  GPU_CALL;
  (void)link, (void)active;
  return NOT_SUPPORTED;
}

/* -- one value a call --------------------------------------------------------------------------------------------- */

struct utilization { uint gpu, memory; };

status nvmlDeviceGetUtilizationRates(device_t device, struct utilization *out) {
  UNCUT_CALL;
  *out = (struct utilization){(uint)value(call.gpu, "utilization_gpu"), (uint)value(call.gpu, "utilization_memory")};
  return SUCCESS;
}

status nvmlDeviceGetEncoderUtilization(device_t device, uint *out, uint *period_us) {
  UNCUT_CALL;
  return *period_us = 167000, put(out, value(call.gpu, "utilization_encoder"));
}

status nvmlDeviceGetDecoderUtilization(device_t device, uint *out, uint *period_us) {
  UNCUT_CALL;
  return *period_us = 167000, put(out, value(call.gpu, "utilization_decoder"));
}

struct memory { ull total, reserved, used, free; };

static struct memory memory_of(const struct call *call) {
  if (call->mig)
    return (struct memory){call->mig->total, 0, call->mig->used, call->mig->total - call->mig->used};
  return (struct memory){value(call->gpu, "memory_total"), value(call->gpu, "memory_reserved"),
                         value(call->gpu, "memory_used"), value(call->gpu, "memory_free")};
}

struct memory_v1 { ull total, free, used; };

/* Its `used` holds what is reserved, as NVML's does. */
status nvmlDeviceGetMemoryInfo(device_t device, struct memory_v1 *out) {
  DEVICE_CALL;
  struct memory memory = memory_of(&call);
  *out = (struct memory_v1){memory.total, memory.free, memory.used + memory.reserved};
  return SUCCESS;
}

UINT_OF_GPU(nvmlDeviceGetPowerUsage, "power_mw")
UINT_OF_GPU(nvmlDeviceGetEnforcedPowerLimit, "power_limit_mw")
UINT_OF_GPU(nvmlDeviceGetPowerManagementLimit, "power_limit_mw")
UINT_OF_GPU(nvmlDeviceGetPowerManagementDefaultLimit, "power_default_limit_mw")
UINT_OF_GPU(nvmlDeviceGetFanSpeed, "fan_speed")
UINT_OF_GPU(nvmlDeviceGetPerformanceState, "performance_state")
UINT_OF_GPU(nvmlDeviceGetPcieReplayCounter, "pcie_replays")

status nvmlDeviceGetPowerManagementLimitConstraints(device_t device, uint *least, uint *most) {
  GPU_CALL;
  return *least = (uint)value(call.gpu, "power_min_limit_mw"), put(most, value(call.gpu, "power_max_limit_mw"));
}

status nvmlDeviceGetTotalEnergyConsumption(device_t device, ull *out) {
  GPU_CALL;
  return put_long(out, value(call.gpu, "energy_mj"));
}

status nvmlDeviceGetTemperature(device_t device, uint sensor, uint *out) {
  GPU_CALL;
  return sensor ? INVALID_ARGUMENT : put(out, value(call.gpu, "temperature"));
}

static status clock_of(struct call *call, const char *highest, uint type, uint *out) {
  static const char *const names[] = {"graphics", "sm", "memory", "video"};
  char key[40];
  if (type > 3) return INVALID_ARGUMENT;
  snprintf(key, sizeof key, "%s%s_clock_mhz", highest, names[type]);
  return put(out, value(call->gpu, key));
}

status nvmlDeviceGetClockInfo(device_t device, uint type, uint *out) {
  GPU_CALL;
  return clock_of(&call, "", type, out);
}

status nvmlDeviceGetMaxClockInfo(device_t device, uint type, uint *out) {
  GPU_CALL;
  return clock_of(&call, "max_", type, out);
}

status nvmlDeviceGetCurrentClocksThrottleReasons(device_t device, ull *out) {
  GPU_CALL;
  return put_long(out, value(call.gpu, "clock_event_reasons"));
}

status nvmlDeviceGetTotalEccErrors(device_t device, uint uncorrected, uint aggregate, ull *out) {
  static const char *const keys[2][2] = {{"ecc_corrected_volatile", "ecc_corrected_aggregate"},
                                         {"ecc_uncorrected_volatile", "ecc_uncorrected_aggregate"}};
  GPU_CALL;
  return uncorrected > 1 || aggregate > 1 ? INVALID_ARGUMENT : put_long(out, value(call.gpu, keys[uncorrected][aggregate]));
}

status nvmlDeviceGetRemappedRows(device_t device, uint *correctable, uint *uncorrectable, uint *pending, uint *failed) {
  UNCUT_CALL;
  *correctable = (uint)value(call.gpu, "rows_correctable");
  *uncorrectable = (uint)value(call.gpu, "rows_uncorrectable");
  *pending = (uint)value(call.gpu, "row_remap_pending");
  *failed = (uint)value(call.gpu, "row_remap_failure");
  return SUCCESS;
}

/* It measures for 20 ms, which is why nobody should ask for it in a tick. */
status nvmlDeviceGetPcieThroughput(device_t device, uint receive, uint *out) {
  sleep_ms(20);
  GPU_CALL;
  return put(out, (receive ? 500ull : 1000ull) * (ull)(call.gpu + 1));
}

struct license_expiry { uint year; unsigned short month, day, hour, minute, second; unsigned char status; };
struct licensable { uint code, licensed; char info[128], product[128]; uint enabled; struct license_expiry expiry; };
struct licenses { int supported; uint count; struct licensable feature[3]; };

/* Two features, of which the second is licensed or not; what is behind them is left as it was. */
status nvmlDeviceGetGridLicensableFeatures_v4(device_t device, struct licenses *out) {
  GPU_CALL;
  out->supported = (int)value(call.gpu, "vgpu_supported");
  out->count = out->supported ? 2 : 0;
  for (uint n = 0; n < out->count; n++) out->feature[n] = (struct licensable){.code = n + 1};
  if (out->count) out->feature[1].licensed = (uint)value(call.gpu, "vgpu_licensed");
  return SUCCESS;
}

#ifndef OLD
struct memory_v2 { uint version; ull total, reserved, free, used; };

status nvmlDeviceGetMemoryInfo_v2(device_t device, struct memory_v2 *out) {
  DEVICE_CALL;
  if (out->version != 0x02000028) return VERSION_MISMATCH;
  struct memory memory = memory_of(&call);
  *out = (struct memory_v2){out->version, memory.total, memory.reserved, memory.free, memory.used};
  return SUCCESS;
}

struct temperature { uint version, sensor; int celsius; };

status nvmlDeviceGetTemperatureV(device_t device, struct temperature *out) {
  GPU_CALL;
  if (out->version != 0x0100000C) return VERSION_MISMATCH;
  if (out->sensor) return INVALID_ARGUMENT;
  return out->celsius = (int)value(call.gpu, "temperature"), SUCCESS;
}

status nvmlDeviceGetCurrentClocksEventReasons(device_t device, ull *out) {
  GPU_CALL;
  return put_long(out, value(call.gpu, "clock_event_reasons"));
}
#endif

#ifdef OLD
enum { ARCHITECTURE = 7, NVLINKS = 12 }; /* Ampere's */
#else
enum { ARCHITECTURE = 9, NVLINKS = 18 }; /* Hopper's */
#endif

status nvmlDeviceGetArchitecture(device_t device, uint *out) {
  DEVICE_CALL;
  return put(out, ARCHITECTURE);
}

/* -- many values a call ------------------------------------------------------------------------------------------- */

enum { UINT = 1, ULONGLONG = 3 };

static const struct field { uint id; const char *key; int type, recent; } fields[] = {
    {3, "ecc_corrected_volatile", ULONGLONG, 0}, {4, "ecc_uncorrected_volatile", ULONGLONG, 0},
    {5, "ecc_corrected_aggregate", ULONGLONG, 0}, {6, "ecc_uncorrected_aggregate", ULONGLONG, 0},
    {29, "retired_single_bit", ULONGLONG, 0}, {30, "retired_double_bit", ULONGLONG, 0},
    {31, "retired_pending", ULONGLONG, 0}, {38, "nvlink_crc_errors", ULONGLONG, 0},
    {52, "nvlink_replay_errors", ULONGLONG, 0}, {59, "nvlink_recovery_errors", ULONGLONG, 0}, {91, "nvlinks", UINT, 0},
    {161, "nvlink_replay_errors", ULONGLONG, 1}, {162, "nvlink_recovery_errors", ULONGLONG, 1},
    {163, "nvlink_crc_errors", ULONGLONG, 1},
    {74, "throttled_power_ns", ULONGLONG, 0}, {75, "throttled_thermal_ns", ULONGLONG, 0},
    {76, "throttled_ns", ULONGLONG, 0}, {77, "throttled_ns", ULONGLONG, 0}, {78, "throttled_ns", ULONGLONG, 0},
    {79, "throttled_ns", ULONGLONG, 0}, {80, "throttled_ns", ULONGLONG, 0}, {81, "throttled_ns", ULONGLONG, 0},
    {82, "memory_temperature", UINT, 0}, {83, "energy_mj", ULONGLONG, 0}, {94, "pcie_replays", UINT, 0},
    {142, "rows_correctable", UINT, 0}, {143, "rows_uncorrectable", UINT, 0}, {144, "row_remap_pending", UINT, 0},
    {145, "row_remap_failure", UINT, 0},
    {185, "power_mw", UINT, 1}, {186, "power_instant_mw", UINT, 1}, {190, "power_limit_mw", UINT, 1},
    {188, "power_max_limit_mw", UINT, 1}, {138, "nvlink_tx_kib", ULONGLONG, 0}, {139, "nvlink_rx_kib", ULONGLONG, 0},
    {197, "pcie_tx_bytes", ULONGLONG, 1}, {198, "pcie_rx_bytes", ULONGLONG, 1},
};

union number { double d; uint ui; ull u; };
struct field_value { uint id, scope; long long timestamp_us, latency_us; uint type; status code; union number value; };

static const struct field *field_of(uint id) {
  for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
    if (fields[i].id == id) return &fields[i];
  return NULL;
}

static status field_failure(int gpu, uint id) {
  char name[24];
  snprintf(name, sizeof name, "field:%u", id);
  for (int i = world.fails - 1; i >= 0; i--)
    if ((world.fail[i].gpu == ANY || world.fail[i].gpu == gpu) && !strcmp(world.fail[i].function, name))
      return world.fail[i].code;
  return SUCCESS;
}

/* The first link has all the errors; the totals over all links are 0 where each link counts for itself. */
static ull field_answer(int gpu, const struct field *field, uint scope) {
  if (field->id == 91) return NVLINKS;
#ifndef OLD
  if (field->id == 38 || field->id == 52 || field->id == 59) return 0;
#endif
  return scope ? 0 : value(gpu, field->key);
}

static void answer_field(const struct call *call, struct field_value *out) {
  char type[24];
  const struct field *field = field_of(out->id);
  int all_links = out->id == 138 || out->id == 139; /* these have all links together as a scope */
  int missing = !field || call->mig || (out->scope >= NVLINKS && !(all_links && out->scope == ALL_LINKS));
#ifdef OLD
  missing = missing || field->recent;
#endif
  out->timestamp_us = (long long)now_us();
  out->latency_us = 12;
  out->code = missing ? NOT_SUPPORTED : field_failure(call->gpu, out->id);
  if (out->code) return;
  snprintf(type, sizeof type, "type_%u", out->id);
  out->type = (uint)number(call->gpu, type, (ull)field->type);
  ull answer = field_answer(call->gpu, field, all_links && out->scope == ALL_LINKS ? 0 : out->scope);
  if (out->type == 0) out->value.d = (double)(long long)answer;
  else if (out->type == UINT) out->value.ui = (uint)answer;
  else out->value.u = answer;
}

status nvmlDeviceGetFieldValues(device_t device, int count, struct field_value *values) {
  DEVICE_CALL;
  if (!values || count <= 0) return INVALID_ARGUMENT;
  for (int i = 0; i < count; i++) answer_field(&call, &values[i]);
  return SUCCESS;
}

/* -- processes ---------------------------------------------------------------------------------------------------- */

/* The older lists have no instances, and some newer ones also have the protected memory. */
struct process_info { uint pid; ull bytes; uint gi, ci; ull protected; };

enum { V1_BYTES = 16, V2_BYTES = 24 };

static int is_of(const struct process *process, const struct call *call, const char *kind) {
  if (process->gpu != call->gpu || (kind && strcmp(process->kind, kind))) return 0;
  return !call->mig || (process->gi == call->mig->gi && process->ci == call->mig->ci);
}

/* With too little room it says how much is needed, and with none it succeeds only where there is none. */
static status running(const struct call *call, const char *kind, uint *count, char *out, size_t item_bytes) {
  uint found = 0, room = *count;
  for (int i = 0; i < world.processes; i++) {
    const struct process *p = &world.process[i];
    if (!is_of(p, call, kind)) continue;
    struct process_info info = {p->pid, p->bytes, p->gi, p->ci, 0};
    if (found < room && out) memcpy(out + found * item_bytes, &info, item_bytes);
    found++;
  }
  *count = found;
  return found > room ? INSUFFICIENT_SIZE : SUCCESS;
}

#define RUNNING(function, kind, item_bytes) \
  status function(device_t device, uint *count, char *out) { \
    DEVICE_CALL; \
    return running(&call, kind, count, out, item_bytes); \
  }

RUNNING(nvmlDeviceGetComputeRunningProcesses, "compute", V1_BYTES)
RUNNING(nvmlDeviceGetGraphicsRunningProcesses, "graphics", V1_BYTES)
RUNNING(nvmlDeviceGetMPSComputeRunningProcesses, "mps", V1_BYTES)
RUNNING(nvmlDeviceGetComputeRunningProcesses_v2, "compute", V2_BYTES)
RUNNING(nvmlDeviceGetGraphicsRunningProcesses_v2, "graphics", V2_BYTES)
RUNNING(nvmlDeviceGetMPSComputeRunningProcesses_v2, "mps", V2_BYTES)
#ifndef OLD
RUNNING(nvmlDeviceGetComputeRunningProcesses_v3, "compute", number(call.gpu, "process_v3_bytes", V2_BYTES))
RUNNING(nvmlDeviceGetGraphicsRunningProcesses_v3, "graphics", number(call.gpu, "process_v3_bytes", V2_BYTES))
RUNNING(nvmlDeviceGetMPSComputeRunningProcesses_v3, "mps", number(call.gpu, "process_v3_bytes", V2_BYTES))
#endif

/* When the driver last measured processes: six times a second, so that a reader may find nothing new. */
static ull measured_us(void) { return now_us() / 166667 * 166667; }

struct process_sample { uint pid; ull timestamp_us; uint sm, memory, encoder, decoder; };

static uint samples_since(const struct call *call, ull since_us) {
  uint found = 0;
  if (measured_us() <= since_us) return 0;
  for (int i = 0; i < world.processes; i++) found += (uint)is_of(&world.process[i], call, NULL);
  return found;
}

static status none_new(uint *count) { return *count = 0, world.no_process_is_success ? SUCCESS : NOT_FOUND; }

status nvmlDeviceGetProcessUtilization(device_t device, struct process_sample *out, uint *count, ull since_us) {
  UNCUT_CALL;
  uint found = samples_since(&call, since_us), room = out ? *count : 0;
  if (!found) return none_new(count);
  *count = found;
  if (found > room) return INSUFFICIENT_SIZE;
  for (int i = 0; i < world.processes; i++) {
    const struct process *p = &world.process[i];
    if (is_of(p, &call, NULL))
      *out++ = (struct process_sample){p->pid, measured_us(), p->sm, p->memory, p->encoder, p->decoder};
  }
  return SUCCESS;
}

#ifndef OLD
struct process_use { ull timestamp_us; uint pid, sm, memory, encoder, decoder, jpeg, ofa; };
struct process_uses { uint version, count; ull since_us; struct process_use *out; };

status nvmlDeviceGetProcessesUtilizationInfo(device_t device, struct process_uses *uses) {
  UNCUT_CALL;
  if (uses->version != 0x01000018) return VERSION_MISMATCH;
  uint found = samples_since(&call, uses->since_us), room = uses->out ? uses->count : 0;
  if (!found) return none_new(&uses->count);
  uses->count = found;
  if (found > room) return INSUFFICIENT_SIZE;
  struct process_use *out = uses->out;
  for (int i = 0; i < world.processes; i++) {
    const struct process *p = &world.process[i];
    if (is_of(p, &call, NULL))
      *out++ = (struct process_use){measured_us(), p->pid, p->sm, p->memory, p->encoder, p->decoder, 0, 0};
  }
  return SUCCESS;
}
#endif

/* -- samples that the driver keeps: as many a second as `sample_period_us` says, values from a list in turn --------- */

enum { KEPT = 120, POWER_SAMPLES = 0, UTILIZATION_SAMPLES = 1 };

struct sample { ull timestamp_us; union number value; };

/* The value at that number of samples since 1970: the script's list in turn, or what the one call answers. */
static ull sample_value(int gpu, const char *list_key, const char *key, ull at) {
  const char *list = setting(gpu, list_key);
  ull found[32];
  int count = 0, used = 0;
  for (; list && count < 32 && sscanf(list, "%llu%n", &found[count], &used) == 1; list += used) count++;
  return count ? found[at % (ull)count] : value(gpu, key);
}

static status samples(struct call *call, const char *list_key, const char *key, ull since_us, uint *count,
                      struct sample *out) {
  ull period_us = number(call->gpu, "sample_period_us", 166667), newest = now_us() / period_us;
  if (!out) return *count = KEPT, SUCCESS;
  uint found = 0, room = *count < KEPT ? *count : KEPT;
  for (ull at = newest - KEPT + 1; at <= newest && found < room; at++)
    if (at * period_us > since_us)
      out[found++] = (struct sample){at * period_us, {.ui = (uint)sample_value(call->gpu, list_key, key, at)}};
  return *count = found, found ? SUCCESS : NOT_FOUND;
}

status nvmlDeviceGetSamples(device_t device, uint kind, ull since_us, uint *type, uint *count, struct sample *out) {
  GPU_CALL;
  *type = UINT;
  if (kind == POWER_SAMPLES) return samples(&call, "power_samples_mw", "power_mw", since_us, count, out);
  if (kind != UTILIZATION_SAMPLES || value(call.gpu, "mig_mode")) return NOT_SUPPORTED;
  return samples(&call, "utilization_samples", "utilization_gpu", since_us, count, out);
}

/* -- GPM: a metric is what the script says when samples are compared; samples are counted in and out ------------ */

#ifndef OLD
enum { SAMPLES = 1024, METRICS = 477 };

static struct gpm_sample { int lent, gpu, gi; double taken_s; } gpm_samples[SAMPLES];
static int gpm_next;

struct gpm_support { uint version, supported; };
struct gpm_metric { uint id; status code; double value; const char *name, *long_name, *unit; };
struct gpm_question { uint version, count; struct gpm_sample *older, *newer; struct gpm_metric metrics[METRICS]; };

static int is_lent(const struct gpm_sample *sample) {
  return sample >= gpm_samples && sample < gpm_samples + SAMPLES && sample->lent;
}

status nvmlGpmQueryDeviceSupport(device_t device, struct gpm_support *out) {
  DEVICE_CALL;
  if (out->version != 1) return VERSION_MISMATCH;
  return put(&out->supported, number(call.gpu, "gpm_supported", 1));
}

status nvmlGpmSampleAlloc(struct gpm_sample **out) {
  CALL(begin(__func__, NONE, NONE));
  for (int tried = 0; tried < SAMPLES; tried++) {
    struct gpm_sample *sample = &gpm_samples[gpm_next++ % SAMPLES];
    if (sample->lent) continue;
    *sample = (struct gpm_sample){.lent = 1};
    return *out = sample, SUCCESS;
  }
  return OUT_OF_MEMORY;
}

status nvmlGpmSampleFree(struct gpm_sample *sample) {
  CALL(begin(__func__, NONE, NONE));
  if (!is_lent(sample)) return INVALID_ARGUMENT;
  return sample->lent = 0, SUCCESS;
}

static status gpm_take(const struct call *call, int gi, struct gpm_sample *sample) {
  if (!is_lent(sample)) return INVALID_ARGUMENT;
  if (!number(call->gpu, "gpm_supported", 1)) return NOT_SUPPORTED;
  *sample = (struct gpm_sample){1, call->gpu, gi, clock_s(CLOCK_MONOTONIC)};
  return SUCCESS;
}

status nvmlGpmSampleGet(device_t device, struct gpm_sample *sample) {
  DEVICE_CALL;
  return gpm_take(&call, call.mig ? (int)call.mig->gi : NONE, sample);
}

status nvmlGpmMigSampleGet(device_t device, uint gi, struct gpm_sample *sample) {
  GPU_CALL;
  for (int slot = 0; slot < SLOTS; slot++)
    if (world.mig[call.gpu][slot].present && world.mig[call.gpu][slot].gi == gi) return gpm_take(&call, (int)gi, sample);
  return NOT_FOUND;
}

static status gpm_failure(int gpu, uint id) {
  char name[24];
  snprintf(name, sizeof name, "gpm:%u", id);
  for (int i = world.fails - 1; i >= 0; i--)
    if ((world.fail[i].gpu == ANY || world.fail[i].gpu == gpu) && !strcmp(world.fail[i].function, name))
      return world.fail[i].code;
  return SUCCESS;
}

/* By default what tells metrics, GPUs and GPU instances apart: 1.25 for the first metric of GPU 0. PCIe and NVLink are
   the whole GPU's. */
static void gpm_answer(const struct gpm_sample *newer, struct gpm_metric *out) {
  char key[40];
  snprintf(key, sizeof key, newer->gi == NONE ? "gpm_%u" : "gpm_%u_gi%d", out->id, newer->gi);
  const char *set = setting(newer->gpu, key);
  out->code = newer->gi != NONE && out->id >= 20 ? NOT_SUPPORTED : gpm_failure(newer->gpu, out->id);
  if (!out->code && !(out->id <= 13 || out->id == 20 || out->id == 21 || out->id == 60 || out->id == 61))
    out->code = NOT_SUPPORTED;
  out->value = set ? strtod(set, NULL) : out->id + 0.25 + newer->gpu + (newer->gi == NONE ? 0 : 10 * newer->gi);
}

status nvmlGpmMetricsGet(struct gpm_question *question) {
  CALL(begin(__func__, is_lent(question->newer) ? question->newer->gpu : NONE, NONE));
  const struct gpm_sample *older = question->older, *newer = question->newer;
  if (question->version != 1) return VERSION_MISMATCH;
  if (question->count > METRICS || !is_lent(older) || !is_lent(newer) || older->gpu != newer->gpu ||
      older->gi != newer->gi || older->taken_s >= newer->taken_s)
    return INVALID_ARGUMENT;
  if (newer->taken_s - older->taken_s < 0.1) return NO_DATA;
  for (uint i = 0; i < question->count; i++) gpm_answer(newer, &question->metrics[i]);
  return SUCCESS;
}
#endif

/* -- MIG ---------------------------------------------------------------------------------------------------------- */

status nvmlDeviceGetMigMode(device_t device, uint *current, uint *pending) {
  GPU_CALL;
  *current = *pending = (uint)value(call.gpu, "mig_mode");
  return SUCCESS;
}

status nvmlDeviceIsMigDeviceHandle(device_t device, uint *out) {
  DEVICE_CALL;
  return put(out, call.mig != NULL);
}

status nvmlDeviceGetMaxMigDeviceCount(device_t device, uint *out) {
  GPU_CALL;
  return put(out, 7);
}

status nvmlDeviceGetMigDeviceHandleByIndex(device_t device, uint index, const struct handle **out) {
  GPU_CALL;
  if (index >= SLOTS) return INVALID_ARGUMENT;
  if (!world.mig[call.gpu][index].present) return NOT_FOUND;
  return *out = &mig_handle[call.gpu][index], SUCCESS;
}

status nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device_t device, const struct handle **out) {
  DEVICE_CALL;
  if (!call.mig) return INVALID_ARGUMENT;
  return *out = &gpu_handle[call.gpu], SUCCESS;
}

status nvmlDeviceGetGpuInstanceId(device_t device, uint *out) {
  DEVICE_CALL;
  return call.mig ? put(out, call.mig->gi) : INVALID_ARGUMENT;
}

status nvmlDeviceGetComputeInstanceId(device_t device, uint *out) {
  DEVICE_CALL;
  return call.mig ? put(out, call.mig->ci) : INVALID_ARGUMENT;
}

struct attributes {
  uint multiprocessors, copy_engines, decoders, encoders, jpegs, ofas, gi_slices, ci_slices;
  ull memory_mib;
};

status nvmlDeviceGetAttributes_v2(device_t device, struct attributes *out) {
  DEVICE_CALL;
  if (!call.mig) return NOT_SUPPORTED;
  uint slices = (uint)strtoul(call.mig->profile, NULL, 10);
  *out = (struct attributes){16 * slices, slices, 1, 0, 1, 0, slices, slices, call.mig->total >> 20};
  return SUCCESS;
}

/* -- events: each `xid` line that is new since the set was made is one -------------------------------------------- */

struct event_set { int registered[GPUS], told; };
struct event { const struct handle *device; ull type, data; uint gi, ci; };

enum { XID_EVENT = 8 };

status nvmlDeviceGetSupportedEventTypes(device_t device, ull *out) {
  GPU_CALL;
  return put_long(out, number(call.gpu, "event_types", XID_EVENT | 1 | 2));
}

status nvmlEventSetCreate(struct event_set **out) {
  CALL(begin(__func__, NONE, NONE));
  *out = calloc(1, sizeof **out);
  (*out)->told = world.xids;
  return SUCCESS;
}

status nvmlEventSetFree(struct event_set *set) {
  CALL(begin(__func__, NONE, NONE));
  return free(set), SUCCESS;
}

status nvmlDeviceRegisterEvents(device_t device, ull mask, struct event_set *set) {
  GPU_CALL;
  if (mask & ~(ull)(XID_EVENT | 1 | 2)) return NOT_SUPPORTED;
  return set->registered[call.gpu] = 1, SUCCESS;
}

static int next_event(struct event_set *set, struct event *out) {
  while (set->told < world.xids) {
    struct xid xid = world.xid[set->told++];
    if (xid.gpu < 0 || xid.gpu >= GPUS || !set->registered[xid.gpu]) continue;
    *out = (struct event){&gpu_handle[xid.gpu], XID_EVENT, xid.code, xid.gi, xid.ci};
    return 1;
  }
  return 0;
}

status nvmlEventSetWait_v2(struct event_set *set, struct event *out, uint timeout_ms) {
  double until = clock_s(CLOCK_MONOTONIC) + timeout_ms / 1e3;
  CALL(begin(__func__, NONE, NONE));
  while (!next_event(set, out)) {
    for (int gpu = 0; gpu < GPUS; gpu++)
      if (set->registered[gpu] && state_of(gpu) == GPU_IS_LOST) return GPU_IS_LOST;
    if (clock_s(CLOCK_MONOTONIC) >= until) return TIMEOUT;
    pthread_mutex_unlock(&lock);
    sleep_ms(timeout_ms < 50 ? timeout_ms : 50); /* rarely: somebody waits here all the time */
    pthread_mutex_lock(&lock);
    refresh();
    if (!users) return UNINITIALIZED;
  }
  return SUCCESS;
}
