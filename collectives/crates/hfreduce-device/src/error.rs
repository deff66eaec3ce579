//! Errors of GPUs: the call, the device, the code, and the remedy.

/// The reason why a device cannot be used, or failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// The driver's library cannot be loaded.
    #[error(
        "the CUDA driver `{library}` cannot be loaded ({why}); install the NVIDIA driver, ask for a \
         GPU in the pod, or name the library in HFREDUCE_CUDA_LIBRARY"
    )]
    Library {
        /// The name or path that was tried.
        library: String,
        /// The loader's message.
        why: String,
    },
    /// The driver lacks a required function.
    #[error("`{library}` has no {symbol}; a driver for CUDA 11.2 or later is needed")]
    Symbol {
        /// The library.
        library: String,
        /// The missing function.
        symbol: &'static str,
    },
    /// A call that returned an error.
    #[error("{call} on device {device} failed: {name} ({code}), {text}; {}", remedy(*.code))]
    Call {
        /// The function.
        call: &'static str,
        /// The device's number, -1 before a device is chosen.
        device: i32,
        /// CUresult.
        code: i32,
        /// Its name in the driver.
        name: String,
        /// The driver's description of it.
        text: String,
    },
    /// A copy that did not complete.
    #[error(
        "{what} on device {device} is not complete at the operation's deadline; look for a hung \
         kernel before it in the stream, or for Xid messages in the kernel's log"
    )]
    Late {
        /// The operation.
        what: &'static str,
        /// The device's number.
        device: i32,
    },
    /// The limit of pinned memory is reached.
    #[error(
        "{requested} bytes of pinned memory for device {device} ({used} of {limit} bytes are in use); \
         raise HFREDUCE_PINNED_BYTES or reduce in smaller pieces"
    )]
    Full {
        /// Bytes requested.
        requested: usize,
        /// Bytes in use.
        used: usize,
        /// Bytes allowed.
        limit: usize,
        /// The device's number.
        device: i32,
    },
    /// A system call failed.
    #[error("{what} for device {device}: {why}")]
    Host {
        /// The operation.
        what: &'static str,
        /// The device's number.
        device: i32,
        /// The system's message.
        why: String,
    },
    /// The device was closed, or belongs to the parent of this forked process.
    #[error("device {device} {why}; open it again in this process")]
    Closed {
        /// The device's number.
        device: i32,
        /// The reason.
        why: &'static str,
    },
}

/// CUresult: the work is not complete yet.
pub(crate) const NOT_READY: i32 = 600;

/// The remedy for a code of the driver.
fn remedy(code: i32) -> &'static str {
    match code {
        2 => "free memory of this GPU, or lower HFREDUCE_PINNED_BYTES",
        3 | 4 => {
            "the driver is not up in this process: call this before exit, and not after a fork"
        }
        100 | 101 => "no such GPU is visible: look at CUDA_VISIBLE_DEVICES and the pod's resources",
        214 | 215 | 220 | 221 | 226 => "the GPU is faulty: drain its node and look for its Xid",
        700 | 714..=719 => "a kernel of the program failed before: run with CUDA_LAUNCH_BLOCKING=1",
        712 | 713 => "the memory is already registered: this is a bug, report it",
        802 | 803 => "driver and library do not match: install the same version of both",
        _ => "look at `nvidia-smi` and the kernel's log for Xid messages",
    }
}
