/* A stand-in for libcuda that computes nothing. It has one Hopper GPU, hands out addresses, and notes the kernels in the
 * order in which they are put on streams, with the threads that put them there, and the texts that it would compile. A
 * launch takes a while before it is noted, so that threads meet between the kernels of a call. FA3_STAND_IN_CACHE=1 says
 * that it has all kernels in its cache on disk.
 *
 * It has the functions that fa3-cuda and exported launchers call, with the driver's signatures as far as they are used.
 * With FA3_STAND_IN_AT_ONCE=1 a launch takes no time, and is not noted: bench/host.py measures the host.
 * If STAND_IN_LOG names a file, it notes there what is loaded and launched, with all arguments.
 */
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, MOST = 1 << 16, NAME = 32, PARAMETERS = 64 };

struct launch {
    long thread;
    uint64_t stream;
    char kernel[NAME];
};

/* CUlaunchConfig. An attribute is a number, 4 bytes that are not used, and a value. */
struct config {
    unsigned grid[3], block[3], smem;
    void *stream;
    struct { unsigned id, unused, value[16]; } *attributes;
    unsigned attribute_count;
};

/* A kernel of a module of PTX, with the sizes of its parameters. The name comes first. */
struct kernel {
    char name[NAME];
    unsigned count, bytes[PARAMETERS];
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

/* What tests set: whether streams are captured, and this thread's current stream of torch. */
static int is_captured;
static _Thread_local void *torchs_stream = (void *)7;
void capture(int is) { is_captured = is; }
void use_stream(void *stream) { torchs_stream = stream; }

static void wait_a_while(void) {
    struct timespec time = {0, 20000};
    nanosleep(&time, NULL);
}

static FILE *notes;
static int is_at_once;

__attribute__((constructor)) static void read_environment(void) {
    const char *path = getenv("STAND_IN_LOG");
    if (path) notes = fopen(path, "w");
    is_at_once = getenv("FA3_STAND_IN_AT_ONCE") != NULL;
}

static void say(const char *format, ...) {
    if (!notes) return;
    va_list arguments;
    va_start(arguments, format);
    vfprintf(notes, format, arguments);
    va_end(arguments);
}

static uint64_t hash(uint64_t hash, const void *bytes, size_t count) {
    for (size_t i = 0; i < count; i++) hash = (hash ^ ((const unsigned char *)bytes)[i]) * 0x100000001b3;
    return hash;
}

static void say_launch(const struct config *config, const struct kernel *kernel, void **arguments) {
    const unsigned *grid = config->grid, *block = config->block;
    if (!notes) return;
    say("launch %s grid %u %u %u block %u %u %u smem %u", kernel->name, grid[0], grid[1], grid[2], block[0], block[1],
        block[2], config->smem);
    for (unsigned i = 0; i < config->attribute_count; i++) {
        /* The size of a cluster is three numbers. */
        unsigned id = config->attributes[i].id, *value = config->attributes[i].value;
        say(" attribute %u %u", id, value[0]);
        if (id == 4) say(" %u %u", value[1], value[2]);
    }
    for (unsigned i = 0; i < kernel->count; i++) {
        say(" ");
        for (unsigned j = 0; j < kernel->bytes[i]; j++) say("%02x", ((unsigned char *)arguments[i])[j]);
    }
    say("\n");
}

int cuLaunchKernelEx(const struct config *config, void *function, void **arguments, void **extra) {
    (void)extra;
    if (is_at_once) return SUCCESS;
    say_launch(config, function, arguments);
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
int cuCtxSetCurrent(void *context) { current = context; return SUCCESS; }
int cuCtxSynchronize(void) { return SUCCESS; }
int cuThreadExchangeStreamCaptureMode(int *mode) { (void)mode; return SUCCESS; }
static int load(void **module, const char *text) {
    const char *end = strstr(text, "\n)");
    struct kernel *kernel = *module = calloc(1, sizeof *kernel);
    say("module %016lx\n", (unsigned long)hash(0xcbf29ce484222325, text, strlen(text)));
    for (const char *at = strstr(text, " .param "); at && at < end; at = strstr(at + 1, " .param ")) {
        const char *array = strchr(at, '['), *line = strchr(at, '\n');
        int is_short = !strncmp(at, " .param .u32", 12) || !strncmp(at, " .param .f32", 12);
        kernel->bytes[kernel->count++] = array && array < line ? (unsigned)atoi(array + 1) : is_short ? 4 : 8;
    }
    return SUCCESS;
}
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
    return load(module, image);
}
/* Takes PTX, and machine code, which is text here: that of another architecture is refused, and "lost" breaks the
 * device. */
int cuModuleLoadData(void **module, const void *image) {
    if (strncmp(image, "lost", 4) == 0) return 700;
    if (strncmp(image, "sm_90a", 6) != 0 && strncmp(image, ".version", 8) != 0) return 209;
    return load(module, image);
}
int cuModuleGetFunction(void **function, void *module, const char *name) {
    *function = memcpy(malloc(sizeof(struct kernel)), module, sizeof(struct kernel));
    strncpy(*function, name, NAME - 1);
    return SUCCESS;
}
int cuModuleUnload(void *module) { free(module); return SUCCESS; }
int cuFuncSetAttribute(void *function, int attribute, int value) {
    say("attribute %d of %s is %d\n", attribute, (const char *)function, value);
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
int cuMemsetD8_v2(uint64_t address, unsigned char value, size_t bytes) {
    (void)address, (void)value, (void)bytes;
    return SUCCESS;
}
int cuMemcpyHtoD_v2(uint64_t address, const void *from, size_t bytes) {
    (void)address, (void)from, (void)bytes;
    return SUCCESS;
}
/* All memory is 0. */
int cuMemcpyDtoH_v2(void *to, uint64_t address, size_t bytes) {
    (void)address;
    memset(to, 0, bytes);
    return SUCCESS;
}
int cuMemFree_v2(uint64_t address) { (void)address; return SUCCESS; }
int cuMemGetInfo_v2(size_t *free_bytes, size_t *all) { *free_bytes = *all = (size_t)80 << 30; return SUCCESS; }
int cuMemsetD8Async(uint64_t address, unsigned char value, size_t bytes, void *stream) {
    (void)address, (void)value, (void)bytes, (void)stream;
    return SUCCESS;
}
int cuStreamIsCapturing(void *stream, int *status) { (void)stream; *status = is_captured; return SUCCESS; }
int cuStreamGetId(void *stream, uint64_t *id) { *id = (uint64_t)stream; return SUCCESS; }
int cuStreamSynchronize(void *stream) { (void)stream; return SUCCESS; }
/* A map begins with a hash of its arguments. */
int cuTensorMapEncodeTiled(void *map, int type, unsigned rank, void *address, const uint64_t *dims,
                           const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave,
                           int swizzle, int promotion, int fill) {
    uint64_t numbers[] = {(uint64_t)type, rank, (uint64_t)address, (uint64_t)interleave, (uint64_t)swizzle,
                          (uint64_t)promotion, (uint64_t)fill};
    uint64_t all = hash(0xcbf29ce484222325, numbers, sizeof numbers);
    all = hash(hash(all, dims, rank * sizeof *dims), strides, (rank - 1) * sizeof *strides);
    all = hash(hash(all, box, rank * sizeof *box), steps, rank * sizeof *steps);
    memset(map, 0, 128);
    memcpy(map, &all, sizeof all);
    return SUCCESS;
}
int cuGetErrorName(int error, const char **name) { (void)error; *name = "a stand-in's error"; return SUCCESS; }
int cuGetErrorString(int error, const char **text) { (void)error; *text = "a stand-in's error"; return SUCCESS; }

/* DLPack's exchange, version 1: torch's table, in which tensors are on GPU 0, wherever they are. */
struct tensor { void *data; int device_type, device; };
struct exchange { void *head[5]; int (*describe)(void *, struct tensor *); int (*stream)(int, int, void **); };
static struct exchange torchs;

static int describe_on_gpu(void *object, struct tensor *tensor) {
    int result = torchs.describe(object, tensor);
    tensor->device_type = 2, tensor->device = 0;
    return result;
}
static int stream_on_gpu(int type, int device, void **stream) {
    (void)type, (void)device;
    *stream = torchs_stream;
    return 0;
}
struct exchange *exchange_on_gpu(const struct exchange *given) {
    static struct exchange on_gpu;
    torchs = on_gpu = *given;
    on_gpu.describe = describe_on_gpu, on_gpu.stream = stream_on_gpu;
    return &on_gpu;
}
