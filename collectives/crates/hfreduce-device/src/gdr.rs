//! GDRCopy: a GPU's memory mapped into this process, read and written by the processor.
//!
//! Types and names are those of `gdrapi.h` 2, loaded at run time like the driver. GDRCopy is optional: without
//! it all copies use the copy engines.

use std::ffi::{c_int, c_uint, c_ulong, c_void};

use libloading::os::unix::Library;

use crate::cuda::Pointer;

/// Name of its library in packages.
pub const LIBRARY: &str = "libgdrapi.so.2";

/// `gdr_t`.
type Session = *mut c_void;

/// `gdr_mh_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Pin {
    number: c_ulong,
}

/// `gdr_info_v2_t`.
#[repr(C)]
#[derive(Default)]
struct Info {
    address: u64,
    _mapped_bytes: u64,
    _page_bytes: u32,
    _cycles: u64,
    _cycles_per_ms: u32,
    _flags: c_uint,
    _kind: c_int,
}

macro_rules! functions {
    ($($field:ident = $symbol:ident ( $($argument:ty),* ) -> $result:ty;)*) => {
        struct Functions { $($field: unsafe extern "C" fn($($argument),*) -> $result,)* }

        /// Names of all functions of the library that are called.
        pub const FUNCTIONS: &[&str] = &[$(stringify!($symbol)),*];

        impl Functions {
            fn of(library: &Library) -> Result<Self, String> {
                $(
                    // SAFETY: the type is the one that `gdrapi.h` declares for this name.
                    let symbol_address = unsafe { library.get(concat!(stringify!($symbol), "\0").as_bytes()) };
                    let $field: unsafe extern "C" fn($($argument),*) -> $result = match symbol_address {
                        Ok(symbol) => *symbol,
                        Err(_) => return Err(concat!("it has no ", stringify!($symbol)).to_owned()),
                    };
                )*
                Ok(Self { $($field),* })
            }
        }
    };
}

functions! {
    open = gdr_open() -> Session;
    close = gdr_close(Session) -> c_int;
    pin = gdr_pin_buffer(Session, c_ulong, usize, u64, u32, *mut Pin) -> c_int;
    unpin = gdr_unpin_buffer(Session, Pin) -> c_int;
    info = gdr_get_info_v2(Session, Pin, *mut Info) -> c_int;
    map = gdr_map(Session, Pin, *mut *mut c_void, usize) -> c_int;
    unmap = gdr_unmap(Session, Pin, *mut c_void, usize) -> c_int;
    write = gdr_copy_to_mapping(Pin, *mut c_void, *const c_void, usize) -> c_int;
    read = gdr_copy_from_mapping(Pin, *mut c_void, *const c_void, usize) -> c_int;
}

/// A connection to its kernel module, for use by one thread.
pub struct Gdr {
    functions: Functions,
    session: Session,
    // Dropped after the functions, which point into it.
    _library: Library,
}

// SAFETY: the library has no thread-local state; one thread at a time calls it.
unsafe impl Send for Gdr {}

/// Mapped memory of a GPU. Release it with [`Gdr::release`].
pub struct Mapped {
    pin: Pin,
    map: *mut c_void,
    bytes: usize,
    /// The GPU's address of the mapping's first byte.
    from: Pointer,
}

// SAFETY: an address range, used only by its owner.
unsafe impl Send for Mapped {}

impl Gdr {
    /// Loads the library and connects to its kernel module.
    ///
    /// # Errors
    /// The reason why GDRCopy is not available, which is not a failure.
    pub fn open(library: &str) -> Result<Self, String> {
        // SAFETY: its initialisers only read the environment; the caller chooses the library.
        let opened = unsafe { Library::open(Some(library), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        let opened = opened.map_err(|error| {
            std::error::Error::source(&error).map_or(error.to_string(), |e| e.to_string())
        })?;
        let functions = Functions::of(&opened)?;
        // SAFETY: no arguments.
        let session = unsafe { (functions.open)() };
        if session.is_null() {
            return Err(format!(
                "{library} finds no kernel module: load gdrdrv and let /dev/gdrdrv into the pod"
            ));
        }
        Ok(Self { functions, session, _library: opened })
    }

    /// Maps `bytes` bytes of a GPU's memory at `from`, both multiples of a GPU's page.
    pub(crate) fn map(&self, from: Pointer, bytes: usize) -> Result<Mapped, String> {
        let mut pin = Pin::default();
        // SAFETY: an address that the driver checks, and storage for the handle.
        let code =
            unsafe { (self.functions.pin)(self.session, from as c_ulong, bytes, 0, 0, &mut pin) };
        check("gdr_pin_buffer", code)?;
        let mut map = std::ptr::null_mut();
        // SAFETY: a handle of this session, and storage for the address.
        let code = unsafe { (self.functions.map)(self.session, pin, &mut map, bytes) };
        if let Err(why) = check("gdr_map", code) {
            self.unpin(pin);
            return Err(why);
        }
        let mapped = Mapped { pin, map, bytes, from };
        let mut info = Info::default();
        // SAFETY: a handle of this session, and storage for its properties.
        let code = unsafe { (self.functions.info)(self.session, pin, &mut info) };
        let checked = check("gdr_get_info_v2", code).and_then(|()| match info.address == from {
            true => Ok(()),
            false => Err(format!("it mapped {:#x} instead of {from:#x}", info.address)),
        });
        match checked {
            Ok(()) => Ok(mapped),
            Err(why) => {
                self.release(mapped);
                Err(why)
            }
        }
    }

    /// Copies from the GPU.
    ///
    /// # Safety
    /// The GPU's memory is allocated and mapped by `mapped`; `to` is writable for `bytes`.
    pub(crate) unsafe fn read(
        &self,
        mapped: &Mapped,
        to: *mut u8,
        from: Pointer,
        bytes: usize,
    ) -> Result<(), String> {
        // SAFETY: guaranteed by the caller.
        let code = unsafe { (self.functions.read)(mapped.pin, to.cast(), mapped.at(from), bytes) };
        check("gdr_copy_from_mapping", code)
    }

    /// Copies to the GPU; work that is queued on it afterwards reads the new bytes.
    ///
    /// # Safety
    /// The GPU's memory is allocated and mapped by `mapped`; `from` is readable for `bytes`.
    pub(crate) unsafe fn write(
        &self,
        mapped: &Mapped,
        to: Pointer,
        from: *const u8,
        bytes: usize,
    ) -> Result<(), String> {
        // SAFETY: guaranteed by the caller.
        let code = unsafe { (self.functions.write)(mapped.pin, mapped.at(to), from.cast(), bytes) };
        check("gdr_copy_to_mapping", code)
    }

    /// Unmaps and unpins.
    pub(crate) fn release(&self, mapped: Mapped) {
        let Mapped { pin, map, bytes, .. } = mapped;
        // SAFETY: a mapping made by `map`, no longer used.
        let code = unsafe { (self.functions.unmap)(self.session, pin, map, bytes) };
        if let Err(why) = check("gdr_unmap", code) {
            tracing::warn!(why, "cannot unmap memory of a GPU");
        }
        self.unpin(pin);
    }

    fn unpin(&self, pin: Pin) {
        // SAFETY: a handle of this session that is not mapped.
        let code = unsafe { (self.functions.unpin)(self.session, pin) };
        // The driver has unpinned memory that its owner has freed meanwhile.
        if let Err(why) = check("gdr_unpin_buffer", code) {
            tracing::debug!(why, "cannot unpin memory of a GPU");
        }
    }
}

impl Drop for Gdr {
    fn drop(&mut self) {
        // SAFETY: a session made by `open`, without mappings.
        let _ = unsafe { (self.functions.close)(self.session) };
    }
}

impl Mapped {
    /// Address of a byte of the GPU's memory in this process.
    fn at(&self, address: Pointer) -> *mut c_void {
        self.map.wrapping_byte_add((address - self.from) as usize)
    }
}

fn check(call: &'static str, code: c_int) -> Result<(), String> {
    match code {
        0 => Ok(()),
        code => Err(format!("{call} failed: {}", std::io::Error::from_raw_os_error(code.abs()))),
    }
}
