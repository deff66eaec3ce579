//! The CUDA driver API: the functions that copies need, loaded at run time.
//!
//! Types and values are those of `cuda.h`; names have the version suffix that fixes their ABI. The list below
//! is complete: these functions copy, order and pin, and none launches a kernel.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::Arc;

use libloading::os::unix::Library;

use crate::error::DeviceError;

/// Name of the driver's library in every installation.
pub const LIBRARY: &str = "libcuda.so.1";

/// `CUcontext`, `CUstream`, `CUevent`: opaque pointers of the driver.
pub type Handle = *mut c_void;
/// `CUdeviceptr`.
pub type Pointer = u64;

/// `CU_STREAM_NON_BLOCKING`: not ordered with the legacy default stream.
pub(crate) const STREAM_NON_BLOCKING: c_uint = 1;
/// `CU_EVENT_DISABLE_TIMING`: cheaper to record and to query.
pub(crate) const EVENT_DISABLE_TIMING: c_uint = 2;
/// `CU_MEMHOSTREGISTER_PORTABLE`: pinned for every context.
pub(crate) const HOST_REGISTER_PORTABLE: c_uint = 1;
/// `CU_POINTER_ATTRIBUTE_MEMORY_TYPE` and its value for memory of a device.
const ATTRIBUTE_MEMORY_TYPE: c_int = 2;
const MEMORY_TYPE_DEVICE: c_uint = 2;
/// `CU_POINTER_ATTRIBUTE_BUFFER_ID`: unique for each allocation of the process, never reused.
const ATTRIBUTE_BUFFER_ID: c_int = 7;
/// `CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID`: the physical memory behind an address, which may change under an
/// allocation with reserved addresses.
const ATTRIBUTE_MEMORY_BLOCK_ID: c_int = 20;
/// `CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`.
const ATTRIBUTE_DEVICE_ORDINAL: c_int = 9;

macro_rules! functions {
    ($($field:ident = $symbol:ident ( $($argument:ty),* );)*) => {
        struct Functions { $($field: unsafe extern "C" fn($($argument),*) -> c_int,)* }

        /// Names of all driver functions that are called.
        pub const FUNCTIONS: &[&str] = &[$(stringify!($symbol)),*];

        impl Functions {
            fn of(library: &Library, path: &str) -> Result<Self, DeviceError> {
                $(
                    // SAFETY: the type is the one that `cuda.h` declares for this versioned name.
                    let symbol_address = unsafe { library.get(concat!(stringify!($symbol), "\0").as_bytes()) };
                    let $field: unsafe extern "C" fn($($argument),*) -> c_int = match symbol_address {
                        Ok(symbol) => *symbol,
                        Err(_) => {
                            let symbol = stringify!($symbol);
                            return Err(DeviceError::Symbol { library: path.to_owned(), symbol });
                        }
                    };
                )*
                Ok(Self { $($field),* })
            }
        }
    };
}

functions! {
    init = cuInit(c_uint);
    error_name = cuGetErrorName(c_int, *mut *const c_char);
    error_string = cuGetErrorString(c_int, *mut *const c_char);
    device_count = cuDeviceGetCount(*mut c_int);
    device_get = cuDeviceGet(*mut c_int, c_int);
    device_pci = cuDeviceGetPCIBusId(*mut c_char, c_int, c_int);
    context_retain = cuDevicePrimaryCtxRetain(*mut Handle, c_int);
    context_release = cuDevicePrimaryCtxRelease_v2(c_int);
    context_push = cuCtxPushCurrent_v2(Handle);
    context_pop = cuCtxPopCurrent_v2(*mut Handle);
    stream_create = cuStreamCreate(*mut Handle, c_uint);
    stream_destroy = cuStreamDestroy_v2(Handle);
    stream_wait = cuStreamWaitEvent(Handle, Handle, c_uint);
    event_create = cuEventCreate(*mut Handle, c_uint);
    event_destroy = cuEventDestroy_v2(Handle);
    event_record = cuEventRecord(Handle, Handle);
    event_query = cuEventQuery(Handle);
    host_register = cuMemHostRegister_v2(*mut c_void, usize, c_uint);
    host_unregister = cuMemHostUnregister(*mut c_void);
    copy_down = cuMemcpyDtoHAsync_v2(*mut c_void, Pointer, usize, Handle);
    copy_up = cuMemcpyHtoDAsync_v2(Pointer, *const c_void, usize, Handle);
    pointer_attribute = cuPointerGetAttribute(*mut c_void, c_int, Pointer);
}

/// The driver, loaded and initialised.
pub struct Cuda {
    functions: Functions,
    // Dropped after the functions, which point into it.
    _library: Library,
}

impl std::fmt::Debug for Cuda {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Cuda").finish_non_exhaustive()
    }
}

/// Calls a function and converts its code to an error with its name.
macro_rules! call {
    ($cuda:expr, $device:expr, $field:ident, $symbol:literal, $($argument:expr),*) => {{
        // SAFETY: the arguments satisfy `cuda.h`: valid handles of the driver that were not released, and
        // memory that the callers of this module's functions guarantee.
        let code = unsafe { ($cuda.functions.$field)($($argument),*) };
        $cuda.check(code, $symbol, $device)
    }};
}

impl Cuda {
    /// Loads and initialises the driver.
    ///
    /// # Errors
    /// The driver is missing or too old, or finds no GPU.
    pub fn load(library: &str) -> Result<Arc<Self>, DeviceError> {
        // The driver runs threads: its code must stay loaded after this is dropped.
        let flags = libc::RTLD_NOW | libc::RTLD_LOCAL | libc::RTLD_NODELETE;
        // SAFETY: the driver's initialisers may run in any program that opens it; the caller chooses the
        // library.
        let opened = unsafe { Library::open(Some(library), flags) };
        let opened = opened.map_err(|error| {
            let why =
                std::error::Error::source(&error).map_or(error.to_string(), |e| e.to_string());
            DeviceError::Library { library: library.to_owned(), why }
        })?;
        let functions = Functions::of(&opened, library)?;
        let cuda = Self { functions, _library: opened };
        call!(cuda, -1, init, "cuInit", 0)?;
        Ok(Arc::new(cuda))
    }

    /// Number of visible GPUs.
    ///
    /// # Errors
    /// The error of the driver.
    pub fn devices(&self) -> Result<i32, DeviceError> {
        let mut count = 0;
        call!(self, -1, device_count, "cuDeviceGetCount", &mut count)?;
        Ok(count)
    }

    /// The device that owns this memory; `None` for host memory and unknown addresses.
    pub fn owner_of(&self, pointer: Pointer) -> Option<i32> {
        let mut kind: c_uint = 0;
        let mut ordinal: c_int = -1;
        let (at, of) = ((&raw mut kind).cast(), (&raw mut ordinal).cast());
        call!(
            self,
            -1,
            pointer_attribute,
            "cuPointerGetAttribute",
            at,
            ATTRIBUTE_MEMORY_TYPE,
            pointer
        )
        .ok()?;
        call!(
            self,
            -1,
            pointer_attribute,
            "cuPointerGetAttribute",
            of,
            ATTRIBUTE_DEVICE_ORDINAL,
            pointer
        )
        .ok()?;
        (kind == MEMORY_TYPE_DEVICE && ordinal >= 0).then_some(ordinal)
    }

    /// The allocation of an address, and the physical memory behind it; `None` if the driver does not report
    /// them.
    pub(crate) fn memory_of(&self, pointer: Pointer) -> Option<(u64, u64)> {
        let number = |attribute: c_int| {
            let mut number = 0_u64;
            let at = (&raw mut number).cast();
            let result =
                call!(self, -1, pointer_attribute, "cuPointerGetAttribute", at, attribute, pointer);
            result.ok().map(|()| number)
        };
        Some((number(ATTRIBUTE_BUFFER_ID)?, number(ATTRIBUTE_MEMORY_BLOCK_ID)?))
    }

    pub(crate) fn device(&self, ordinal: i32) -> Result<c_int, DeviceError> {
        let mut device = 0;
        call!(self, ordinal, device_get, "cuDeviceGet", &mut device, ordinal)?;
        Ok(device)
    }

    /// The address on the PCI bus, as in sysfs.
    pub(crate) fn pci(&self, ordinal: i32, device: c_int) -> Result<String, DeviceError> {
        let mut name = [0; 32];
        let length = name.len() as c_int;
        call!(self, ordinal, device_pci, "cuDeviceGetPCIBusId", name.as_mut_ptr(), length, device)?;
        let bytes: Vec<u8> = name.iter().map(|c| *c as u8).take_while(|byte| *byte != 0).collect();
        Ok(String::from_utf8_lossy(&bytes).to_lowercase())
    }

    pub(crate) fn retain(&self, ordinal: i32, device: c_int) -> Result<Handle, DeviceError> {
        let mut context = std::ptr::null_mut();
        call!(self, ordinal, context_retain, "cuDevicePrimaryCtxRetain", &mut context, device)?;
        Ok(context)
    }

    pub(crate) fn release(&self, ordinal: i32, device: c_int) -> Result<(), DeviceError> {
        call!(self, ordinal, context_release, "cuDevicePrimaryCtxRelease_v2", device)
    }

    pub(crate) fn push(&self, ordinal: i32, context: Handle) -> Result<(), DeviceError> {
        call!(self, ordinal, context_push, "cuCtxPushCurrent_v2", context)
    }

    pub(crate) fn pop(&self, ordinal: i32) -> Result<(), DeviceError> {
        let mut context = std::ptr::null_mut();
        call!(self, ordinal, context_pop, "cuCtxPopCurrent_v2", &mut context)
    }

    pub(crate) fn new_stream(&self, ordinal: i32) -> Result<Handle, DeviceError> {
        let mut stream = std::ptr::null_mut();
        let flags = STREAM_NON_BLOCKING;
        call!(self, ordinal, stream_create, "cuStreamCreate", &mut stream, flags)?;
        Ok(stream)
    }

    pub(crate) fn end_stream(&self, ordinal: i32, stream: Handle) -> Result<(), DeviceError> {
        call!(self, ordinal, stream_destroy, "cuStreamDestroy_v2", stream)
    }

    /// Makes work that is queued in `stream` from now on wait for the event.
    pub(crate) fn follow(
        &self,
        ordinal: i32,
        stream: Handle,
        event: Handle,
    ) -> Result<(), DeviceError> {
        call!(self, ordinal, stream_wait, "cuStreamWaitEvent", stream, event, 0)
    }

    pub(crate) fn new_event(&self, ordinal: i32) -> Result<Handle, DeviceError> {
        let mut event = std::ptr::null_mut();
        let flags = EVENT_DISABLE_TIMING;
        call!(self, ordinal, event_create, "cuEventCreate", &mut event, flags)?;
        Ok(event)
    }

    pub(crate) fn end_event(&self, ordinal: i32, event: Handle) -> Result<(), DeviceError> {
        call!(self, ordinal, event_destroy, "cuEventDestroy_v2", event)
    }

    pub(crate) fn record(
        &self,
        ordinal: i32,
        event: Handle,
        stream: Handle,
    ) -> Result<(), DeviceError> {
        call!(self, ordinal, event_record, "cuEventRecord", event, stream)
    }

    /// True once all work before the event has completed.
    pub(crate) fn has_passed(&self, ordinal: i32, event: Handle) -> Result<bool, DeviceError> {
        match call!(self, ordinal, event_query, "cuEventQuery", event) {
            Ok(()) => Ok(true),
            Err(DeviceError::Call { code: crate::error::NOT_READY, .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// # Safety
    /// The memory must stay mapped until it is unregistered.
    pub(crate) unsafe fn register(
        &self,
        ordinal: i32,
        memory: *mut u8,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        let flags = HOST_REGISTER_PORTABLE;
        call!(self, ordinal, host_register, "cuMemHostRegister_v2", memory.cast(), bytes, flags)
    }

    pub(crate) fn unregister(&self, ordinal: i32, memory: *mut u8) -> Result<(), DeviceError> {
        call!(self, ordinal, host_unregister, "cuMemHostUnregister", memory.cast())
    }

    /// # Safety
    /// Both ranges must stay valid until an event that follows in the stream has completed.
    pub(crate) unsafe fn copy_down(
        &self,
        ordinal: i32,
        to: *mut u8,
        from: Pointer,
        bytes: usize,
        stream: Handle,
    ) -> Result<(), DeviceError> {
        call!(self, ordinal, copy_down, "cuMemcpyDtoHAsync_v2", to.cast(), from, bytes, stream)
    }

    /// # Safety
    /// As for [`Cuda::copy_down`].
    pub(crate) unsafe fn copy_up(
        &self,
        ordinal: i32,
        to: Pointer,
        from: *const u8,
        bytes: usize,
        stream: Handle,
    ) -> Result<(), DeviceError> {
        call!(self, ordinal, copy_up, "cuMemcpyHtoDAsync_v2", to, from.cast(), bytes, stream)
    }

    fn check(&self, code: c_int, call: &'static str, device: i32) -> Result<(), DeviceError> {
        if code == 0 {
            return Ok(());
        }
        let text_of = |query: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int| {
            let mut text = std::ptr::null();
            // SAFETY: the driver stores a static string, or null for an unknown code.
            unsafe {
                if query(code, &mut text) == 0 && !text.is_null() {
                    return CStr::from_ptr(text).to_string_lossy().into_owned();
                }
            }
            "unknown".to_owned()
        };
        let name = text_of(self.functions.error_name);
        let text = text_of(self.functions.error_string);
        Err(DeviceError::Call { call, device, code, name, text })
    }
}
