/* A stand-in for libcuda that computes nothing. It has one Hopper GPU, hands out addresses, and notes the kernels in the
 * order in which they are put on streams, with the threads that put them there, and the texts that it would compile. A
 * launch takes a while before it is noted, so that threads meet between the kernels of a call. FA3_STAND_IN_CACHE=1 says
 * that it has all kernels in its cache on disk.
 *
 * It has the functions that fa3-cuda calls, with the driver's signatures as far as they are used.
 */
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, MOST = 1 << 16, NAME = 32 };

struct launch {
    long thread;
    uint64_t stream;
    char kernel[NAME];
};

/* The beginning of CUlaunchConfig. */
struct config {
    unsigned grid[3], block[3], smem;
    void *stream;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct launch launches[MOST];
static long count;
static char *compiled[MOST];
static long compiled_count;
static int compiling, at_once;
static uint64_t next_address = 1ull << 40;
static _Thread_local void *current;

/* What the tests read. */
long noted_count(void) { return count; }
long noted_thread(long i) { return launches[i].thread; }
uint64_t noted_stream(long i) { return launches[i].stream; }
const char *noted_kernel(long i) { return launches[i].kernel; }
long noted_compiled_count(void) { return compiled_count; }
const char *noted_compiled(long i) { return compiled[i]; }
int noted_at_once(void) { return at_once; }
void forget(void) { count = compiled_count = 0; }

static void wait_a_while(void) {
    struct timespec time = {0, 20000};
    nanosleep(&time, NULL);
}

int cuLaunchKernelEx(const struct config *config, void *function, void **arguments, void **extra) {
    (void)arguments, (void)extra;
    wait_a_while();
    pthread_mutex_lock(&mutex);
    if (count < MOST) {
        struct launch *launch = &launches[count++];
        launch->thread = syscall(SYS_gettid);
        launch->stream = (uint64_t)config->stream;
        strncpy(launch->kernel, function, NAME - 1);
    }
    pthread_mutex_unlock(&mutex);
    return SUCCESS;
}

int cuInit(unsigned flags) { (void)flags; return SUCCESS; }
int cuDriverGetVersion(int *version) { *version = 12080; return SUCCESS; }
int cuDeviceGetCount(int *devices) { *devices = 1; return SUCCESS; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal == 0 ? SUCCESS : 101; }
int cuDeviceGetName(char *name, int bytes, int device) {
    (void)device;
    strncpy(name, "a stand-in for a Hopper GPU", bytes);
    return SUCCESS;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    switch (attribute) {
    case 16: *value = 132; break;         /* SMs */
    case 75: *value = 9; break;           /* compute capability 9.0 */
    case 76: *value = 0; break;
    case 97: *value = 227 * 1024; break;  /* shared memory of a CTA */
    default: *value = 1;
    }
    return SUCCESS;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { (void)device; *context = (void *)0x1000; return SUCCESS; }
int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return SUCCESS; }
int cuCtxGetCurrent(void **context) { *context = current; return SUCCESS; }
int cuCtxPushCurrent_v2(void *context) { current = context; return SUCCESS; }
int cuCtxPopCurrent_v2(void **context) { *context = current; current = NULL; return SUCCESS; }
int cuCtxSynchronize(void) { return SUCCESS; }
int cuThreadExchangeStreamCaptureMode(int *mode) { (void)mode; return SUCCESS; }
/* The compiler. Its log goes where the second option says; it is empty if the kernel is in the driver's cache. */
int cuModuleLoadDataEx(void **module, const void *image, unsigned options, void *keys, void **values) {
    (void)options, (void)keys;
    pthread_mutex_lock(&mutex);
    if (compiled_count < MOST) compiled[compiled_count++] = strdup(image);
    if (++compiling > at_once) at_once = compiling;
    pthread_mutex_unlock(&mutex);
    usleep(20000);
    pthread_mutex_lock(&mutex);
    compiling--;
    pthread_mutex_unlock(&mutex);
    if (getenv("FA3_STAND_IN_CACHE") == NULL) strcpy(values[1], "ptxas info    : Used 168 registers");
    *module = malloc(1);
    return SUCCESS;
}
/* Machine code here is text: that of another architecture is refused, and a broken device is found at any call. */
int cuModuleLoadData(void **module, const void *image) {
    if (strncmp(image, "lost", 4) == 0) return 700;
    if (strncmp(image, "sm_90a", 6) != 0) return 209;
    *module = malloc(1);
    return SUCCESS;
}
int cuModuleGetFunction(void **function, void *module, const char *name) {
    (void)module;
    *function = strdup(name);
    return SUCCESS;
}
int cuModuleUnload(void *module) { free(module); return SUCCESS; }
int cuFuncSetAttribute(void *function, int attribute, int value) {
    (void)function, (void)attribute, (void)value;
    return SUCCESS;
}
int cuFuncGetAttribute(int *value, int attribute, void *function) {
    (void)attribute, (void)function;
    *value = 168;
    return SUCCESS;
}
int cuMemAlloc_v2(uint64_t *address, size_t bytes) {
    pthread_mutex_lock(&mutex);
    *address = next_address;
    next_address += (bytes | 0xfffff) + 1;
    pthread_mutex_unlock(&mutex);
    wait_a_while();
    return SUCCESS;
}
int cuMemFree_v2(uint64_t address) { (void)address; return SUCCESS; }
int cuMemGetInfo_v2(size_t *free_bytes, size_t *all) { *free_bytes = *all = (size_t)80 << 30; return SUCCESS; }
int cuMemsetD8Async(uint64_t address, unsigned char value, size_t bytes, void *stream) {
    (void)address, (void)value, (void)bytes, (void)stream;
    return SUCCESS;
}
int cuStreamIsCapturing(void *stream, int *status) { (void)stream; *status = 0; return SUCCESS; }
int cuStreamGetId(void *stream, uint64_t *id) { *id = (uint64_t)stream; return SUCCESS; }
int cuStreamSynchronize(void *stream) { (void)stream; return SUCCESS; }
int cuTensorMapEncodeTiled(void *map, ...) { memset(map, 0, 128); return SUCCESS; }
int cuGetErrorName(int error, const char **name) { (void)error; *name = "a stand-in's error"; return SUCCESS; }
int cuGetErrorString(int error, const char **text) { (void)error; *text = "a stand-in's error"; return SUCCESS; }
