//! What goes wrong with a GPU: the call, the device, the code, and what to do.

/// Why a device cannot be used, or failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// No driver.
    #[error(
        "the CUDA driver `{library}` cannot be loaded ({why}); install the NVIDIA driver, ask for a \
         GPU in the pod, or name the library in HFREDUCE_CUDA_LIBRARY"
    )]
    Library {
        /// The name or path that was tried.
        library: String,
        /// The loader's words.
        why: String,
    },
    /// A driver without a function that we need.
    #[error("`{library}` has no {symbol}; a driver for CUDA 11.2 or later is needed")]
    Symbol {
        /// The library.
        library: String,
        /// What it lacks.
        symbol: &'static str,
    },
    /// A call that the driver refused.
    #[error("{call} on device {device} failed: {name} ({code}), {text}; {}", remedy(*.code))]
    Call {
        /// The function.
        call: &'static str,
        /// The device's number, -1 before one was chosen.
        device: i32,
        /// CUresult.
        code: i32,
        /// Its name in the driver.
        name: String,
        /// The driver's words for it.
        text: String,
    },
    /// A copy that did not end.
    #[error(
        "{what} on device {device} has not ended by the operation's deadline; look for a hung \
         kernel before it in the stream, or for Xid messages in the kernel's log"
    )]
    Late {
        /// What was waited for.
        what: &'static str,
        /// The device's number.
        device: i32,
    },
    /// More pinned memory than allowed.
    #[error(
        "{wanted} bytes of pinned memory for device {device} ({used} of {limit} bytes are in use); \
         raise HFREDUCE_PINNED_BYTES or reduce in smaller pieces"
    )]
    Full {
        /// Bytes asked for.
        wanted: usize,
        /// Bytes in use.
        used: usize,
        /// Bytes allowed.
        limit: usize,
        /// The device's number.
        device: i32,
    },
    /// The machine refused something.
    #[error("{what} for device {device}: {why}")]
    Host {
        /// What was asked for.
        what: &'static str,
        /// The device's number.
        device: i32,
        /// The system's words.
        why: String,
    },
    /// The device was closed, or belongs to the process that this one was forked from.
    #[error("device {device} {why}; open it again in this process")]
    Closed {
        /// The device's number.
        device: i32,
        /// What happened.
        why: &'static str,
    },
}

/// CUresult: the call is not done yet.
pub(crate) const NOT_READY: i32 = 600;

/// What a person does about a code of the driver.
fn remedy(code: i32) -> &'static str {
    match code {
        2 => "free memory of this GPU, or lower HFREDUCE_PINNED_BYTES",
        3 | 4 => {
            "the driver is not up in this process: call this before exit, and not after a fork"
        }
        100 | 101 => "no such GPU is visible: look at CUDA_VISIBLE_DEVICES and the pod's resources",
        214 | 215 | 220 | 221 | 226 => "the GPU is faulty: drain its node and look for its Xid",
        700 | 714..=719 => "a kernel of the program failed before: run with CUDA_LAUNCH_BLOCKING=1",
        712 | 713 => "the memory was registered by somebody else: this is a bug, report it",
        802 | 803 => "driver and library do not fit: install one version of both",
        _ => "look at `nvidia-smi` and the kernel's log for Xid messages",
    }
}
