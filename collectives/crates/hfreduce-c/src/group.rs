//! Joining and leaving a group.

use std::ffi::{c_char, c_void};

use hfreduce_bootstrap::{JoinError, Settings};
use hfreduce_engine::Member;

use crate::comm::{Comm, boxed, open};
use crate::conversions::{put, seconds, text};
use crate::error::{Failure, Status, guard};

const VERSION: u32 = 0x000103;

/// `hfr_options`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Options {
    /// The caller's `sizeof(hfr_options)`.
    pub size: usize,
    /// This rank.
    pub rank: u32,
    /// Number of ranks.
    pub world_size: u32,
    /// HOST:PORT.
    pub rendezvous: *const c_char,
    /// The key …
    pub key: *const c_void,
    /// … and its length.
    pub key_bytes: usize,
    /// File with the key.
    pub key_file: *const c_char,
    /// The job.
    pub job: *const c_char,
    /// This machine.
    pub node: *const c_char,
    /// Its zone.
    pub zone: *const c_char,
    /// Its address.
    pub address: *const c_char,
    /// The topology file.
    pub topology: *const c_char,
    /// Bytes of a chunk.
    pub chunk_bytes: usize,
    /// Time-out of the rendezvous.
    pub connect_seconds: f64,
    /// Silence after which a peer counts as stalled.
    pub liveness_seconds: f64,
    /// Guarantees about result bits; not in the first version of this struct.
    pub determinism: *const c_char,
}

impl Options {
    /// Size of the first version of the struct; later fields then have their defaults.
    const FIRST_BYTES: usize = std::mem::offset_of!(Self, determinism);
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn hfr_version() -> u32 {
    VERSION
}

/// See the header.
///
/// # Safety
/// The header's: the first field of `options` is its size, and its pointers are null or valid;
/// `comm` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hfr_init(options: *const Options, comm: *mut *mut Comm) -> Status {
    guard(|| {
        // SAFETY: guaranteed by the caller.
        let options = unsafe { read(options) }?;
        // SAFETY: as above.
        let settings = unsafe { settings(&options, options.world_size == 1) }?;
        // SAFETY: as above.
        unsafe { join(&settings, comm) }
    })
}

/// See the header.
///
/// # Safety
/// `comm` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hfr_init_from_environment(comm: *mut *mut Comm) -> Status {
    guard(|| {
        let read = |name: &str| std::env::var_os(name).map(|value| value.to_string_lossy().into());
        let settings = Settings::read(read).map_err(JoinError::from)?;
        // SAFETY: guaranteed by the caller.
        unsafe { join(&settings, comm) }
    })
}

/// See the header.
///
/// # Safety
/// `comm` is null or came from `hfr_init` and was not closed; no other call uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hfr_close(comm: *mut Comm, timeout_seconds: f64) -> Status {
    guard(|| {
        if comm.is_null() {
            return Ok(());
        }
        // SAFETY: guaranteed by the caller: this library made it, and no other call uses it.
        let comm = unsafe { Box::from_raw(comm) };
        let broken = comm.engine.close(seconds("timeout_seconds", timeout_seconds)?);
        broken.map_or(Ok(()), |error| Err(error.into()))
    })
}

/// See the header.
///
/// # Safety
/// `comm` is null or open; `reason` is null or text that ends with a null byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hfr_abort(comm: *mut Comm, reason: *const c_char) -> Status {
    guard(|| {
        // SAFETY: guaranteed by the caller.
        let (comm, reason) = unsafe { (open(comm)?, text("reason", reason)?) };
        comm.engine.abort(reason.unwrap_or("hfr_abort was called"));
        Ok(())
    })
}

/// See the header.
///
/// # Safety
/// `comm` is null or open; `rank` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hfr_rank(comm: *const Comm, rank: *mut u32) -> Status {
    // SAFETY: guaranteed by the caller.
    guard(|| unsafe { put("rank", rank, open(comm)?.engine.rank()) })
}

/// See the header.
///
/// # Safety
/// `comm` is null or open; `world_size` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hfr_world_size(comm: *const Comm, world_size: *mut u32) -> Status {
    // SAFETY: guaranteed by the caller.
    guard(|| unsafe { put("world_size", world_size, open(comm)?.engine.world_size() as u32) })
}

/// See the header.
///
/// # Safety
/// `comm` is null or open; `members` is null or has `number` entries; `next` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hfr_reconfigure(
    comm: *mut Comm,
    members: *const u32,
    number: usize,
    timeout_seconds: f64,
    next: *mut *mut Comm,
) -> Status {
    guard(|| {
        // SAFETY: guaranteed by the caller.
        let comm = unsafe { open(comm)? };
        if next.is_null() || members.is_null() {
            return Err(Failure::invalid("members or next is NULL"));
        }
        // SAFETY: just checked, and guaranteed by the caller.
        let ranks = unsafe { std::slice::from_raw_parts(members, number) };
        let members: Vec<Member> = ranks.iter().map(|rank| Member::Rank(*rank)).collect();
        let timeout = seconds("timeout_seconds", timeout_seconds)?;
        let engine = comm.engine.reconfigure(&members, timeout)?;
        // SAFETY: as above.
        unsafe { put("next", next, boxed(engine)) }
    })
}

/// # Safety
/// `settings` are those of this call; `comm` is null or writable.
unsafe fn join(settings: &Settings, comm: *mut *mut Comm) -> Result<(), Failure> {
    if comm.is_null() {
        return Err(Failure::invalid("comm is NULL"));
    }
    let engine = settings.join()?;
    // SAFETY: just checked, and guaranteed by the caller.
    unsafe { put("comm", comm, boxed(engine)) }
}

/// # Safety
/// As for [`hfr_init`].
pub(crate) unsafe fn read(options: *const Options) -> Result<Options, Failure> {
    if options.is_null() {
        return Err(Failure::invalid("options is NULL"));
    }
    // SAFETY: the header demands that the first field of the struct is its size.
    let size = unsafe { options.cast::<usize>().read() };
    if size != size_of::<Options>() && size != Options::FIRST_BYTES {
        let expected = size_of::<Options>();
        return Err(Failure::invalid(format!(
            "options->size is {size} and this library's hfr_options has {expected} bytes: \
             initialize it with HFR_OPTIONS_INIT, and use the header of this version"
        )));
    }
    let mut copied = std::mem::MaybeUninit::<Options>::zeroed();
    // SAFETY: it has `size` bytes, at most those of this version.
    unsafe {
        std::ptr::copy_nonoverlapping(options.cast::<u8>(), copied.as_mut_ptr().cast(), size)
    };
    // SAFETY: numbers and pointers, all of them given or zero, which is what the default is.
    Ok(unsafe { copied.assume_init() })
}

/// Settings of a newcomer: it needs a key, but no rendezvous.
///
/// # Safety
/// As for [`hfr_init`].
pub(crate) unsafe fn of_newcomer(options: &Options) -> Result<Settings, Failure> {
    // SAFETY: guaranteed by the caller.
    let (mut settings, rendezvous) =
        unsafe { (settings(options, true)?, text("rendezvous", options.rendezvous)?) };
    if options.key.is_null() && options.key_file.is_null() {
        return Err(Failure::invalid("give one of key and key_file: those of the group"));
    }
    rendezvous.unwrap_or_default().clone_into(&mut settings.rendezvous);
    Ok(settings)
}

/// `alone`: neither a key nor an address is needed.
///
/// # Safety
/// As for [`hfr_init`].
unsafe fn settings(options: &Options, alone: bool) -> Result<Settings, Failure> {
    // SAFETY: guaranteed by the caller.
    let text = |name, value| unsafe { text(name, value) };
    let key = match (options.key.is_null(), text("key_file", options.key_file)?) {
        (false, None) if options.key_bytes >= 16 => {
            // SAFETY: the header demands `key_bytes` readable bytes.
            unsafe { std::slice::from_raw_parts(options.key.cast::<u8>(), options.key_bytes) }
                .to_vec()
        }
        (false, None) => {
            let bytes = options.key_bytes;
            return Err(Failure::invalid(format!("key_bytes is {bytes}: at least 16 are needed")));
        }
        (true, Some(path)) => Settings::key_in(path).map_err(JoinError::from)?,
        (true, None) if alone => vec![0; 32],
        _ => return Err(Failure::invalid("give one of key and key_file")),
    };
    let rendezvous = match text("rendezvous", options.rendezvous)? {
        Some(text) => text,
        None if alone => "127.0.0.1:0",
        None => return Err(Failure::invalid("rendezvous is NULL: give HOST:PORT of rank 0")),
    };
    let mut settings = Settings::new(options.rank, options.world_size, rendezvous, &key);
    settings.job = text("job", options.job)?.unwrap_or_default().to_owned();
    for (name, value, place) in
        [("node", options.node, &mut settings.node), ("zone", options.zone, &mut settings.zone)]
    {
        if let Some(text) = text(name, value)? {
            text.clone_into(place);
        }
    }
    if let Some(text) = text("address", options.address)? {
        settings.address = Settings::addresses("address", text).map_err(JoinError::from)?;
    }
    if let Some(text) = text("determinism", options.determinism)? {
        settings.determinism = Settings::modes("determinism", text).map_err(JoinError::from)?;
    }
    settings.topology = text("topology", options.topology)?.map(Into::into);
    settings.chunk_bytes = Some(options.chunk_bytes).filter(|bytes| *bytes > 0);
    for (name, value, place) in [
        ("connect_seconds", options.connect_seconds, &mut settings.connect),
        ("liveness_seconds", options.liveness_seconds, &mut settings.liveness),
    ] {
        if value != 0.0 {
            *place = seconds(name, value)?;
        }
    }
    Ok(settings)
}
