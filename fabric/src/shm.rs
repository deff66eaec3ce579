//! Memory shared by processes of one node: anonymous files, and descriptors over UNIX sockets.
//!
//! Neither `/dev/shm` (64 MiB in a pod) nor locked memory (8 MiB in a pod) is used: a segment is a
//! memfd, sealed so that no peer can shrink it while it is mapped.

mod mapping;

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Duration;

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use rustix::mm::ProtFlags;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

use crate::deadline::Deadline;
use mapping::{SharedMapping, map};

/// Maximum number of descriptors in one message (the kernel allows 253).
pub const DESCRIPTORS_MAX: usize = 250;
/// File system type that `statfs` reports for huge pages.
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// Shared memory that several processes map. Unmapped when dropped.
#[derive(Debug)]
pub struct Segment {
    fd: OwnedFd,
    mapping: SharedMapping,
}

impl Segment {
    /// Creates zeroed memory. Pages are allocated on first touch.
    ///
    /// # Errors
    /// Returns the kernel's error: not enough memory, or too many descriptors.
    pub fn create(name: &str, bytes: usize) -> io::Result<Self> {
        let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&fd, bytes as u64)?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Self::map(fd, bytes)
    }

    /// Maps memory that a peer created. It must have the expected size and be sealed: a peer that
    /// could shrink it could kill this process with SIGBUS.
    ///
    /// # Errors
    /// `InvalidData` if the size, the seals or the page size are wrong, or the kernel's error.
    pub fn open(fd: OwnedFd, bytes: usize) -> io::Result<Self> {
        check_sealed(&fd, bytes)?;
        Self::map(fd, bytes)
    }

    fn map(fd: OwnedFd, bytes: usize) -> io::Result<Self> {
        let mapping = map(&fd, bytes, ProtFlags::READ | ProtFlags::WRITE)?;
        Ok(Self { fd, mapping })
    }

    /// First byte of the segment. Valid for [`Segment::bytes`] bytes while the segment exists.
    pub fn base(&self) -> *mut u8 {
        self.mapping.base.as_ptr()
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.mapping.bytes
    }

    /// Address of a range; `None` if it is not entirely inside the segment.
    pub fn at(&self, offset: u64, bytes: usize) -> Option<*mut u8> {
        self.mapping.at(offset, bytes)
    }

    /// The descriptor, to pass to a peer.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Keeps the mapping and closes the descriptor.
    pub fn into_mapped(self) -> Mapped {
        Mapped { mapping: self.mapping }
    }

    /// A read-only descriptor, to pass to a peer that opens a [`View`].
    ///
    /// # Errors
    /// Returns the kernel's error; `NotFound` if `/proc` is not mounted.
    pub fn read_only_fd(&self) -> io::Result<OwnedFd> {
        let path = format!("/proc/self/fd/{}", self.fd.as_raw_fd());
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        Ok(rustix::fs::open(path, flags, Mode::empty())?)
    }
}

/// A [`Segment`] whose descriptor this process no longer needs. Unmapped when dropped.
#[derive(Debug)]
pub struct Mapped {
    mapping: SharedMapping,
}

impl Mapped {
    /// First byte of the memory.
    pub fn base(&self) -> *mut u8 {
        self.mapping.base.as_ptr()
    }

    /// Address of a range; `None` if it is not entirely inside the memory.
    pub fn at(&self, offset: u64, bytes: usize) -> Option<*mut u8> {
        self.mapping.at(offset, bytes)
    }
}

/// A peer's [`Segment`], to read from. Unmapped when dropped.
#[derive(Debug)]
pub struct View {
    mapping: SharedMapping,
}

impl View {
    /// Maps a peer's segment. The conditions of [`Segment::open`] apply.
    ///
    /// # Errors
    /// As [`Segment::open`].
    pub fn open(fd: &OwnedFd, bytes: usize) -> io::Result<Self> {
        check_sealed(fd, bytes)?;
        Ok(Self { mapping: map(fd, bytes, ProtFlags::READ)? })
    }

    /// Address of a range; `None` if it is not entirely inside the view.
    pub fn at(&self, offset: u64, bytes: usize) -> Option<*const u8> {
        self.mapping.at(offset, bytes).map(<*mut u8>::cast_const)
    }
}

fn check_sealed(fd: &OwnedFd, bytes: usize) -> io::Result<()> {
    // Pages can be removed in spite of the seals; a touch raises SIGBUS if no huge page is free.
    if rustix::fs::fstatfs(fd)?.f_type as u64 == HUGETLBFS_MAGIC {
        let why = "a shared segment of huge pages, expected ordinary ones";
        return Err(io::Error::new(io::ErrorKind::InvalidData, why));
    }
    let actual = rustix::fs::fstat(fd)?.st_size;
    let seals = rustix::fs::fcntl_get_seals(fd)?;
    if actual == bytes as i64 && seals.contains(SealFlags::SHRINK | SealFlags::SEAL) {
        return Ok(());
    }
    Err(io::Error::new(
        io::ErrorKind::InvalidData,
        format!("a shared segment has {actual} bytes (expected {bytes}, sealed)"),
    ))
}

/// Listens on an abstract name, which exists as long as the socket and leaves no file behind.
///
/// # Errors
/// Returns the kernel's error; `AddrInUse` if the name is in use.
pub fn listen(name: &str) -> io::Result<UnixListener> {
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Connects to an abstract name; both ends must run as the same user.
///
/// # Errors
/// `PermissionDenied` for another user's socket, `TimedOut`, or the kernel's error.
pub fn dial(name: &str, deadline: Deadline) -> io::Result<UnixStream> {
    let address = SocketAddr::from_abstract_name(name)?;
    loop {
        match UnixStream::connect_addr(&address) {
            Ok(stream) => return same_user(stream),
            // The backlog is full: the listener exists and will accept later.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let remaining = deadline.remaining().ok_or(io::ErrorKind::TimedOut)?;
                std::thread::sleep(remaining.min(Duration::from_millis(5)));
            }
            Err(error) => return Err(error),
        }
    }
}

/// Accepts the next connection from a process of the same user; closes and skips connections of
/// other users.
///
/// # Errors
/// `TimedOut`, or the kernel's error.
pub fn accept(listener: &UnixListener, deadline: Deadline) -> io::Result<UnixStream> {
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                if let Ok(stream) = same_user(stream) {
                    return Ok(stream);
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                wait_readable(listener, deadline)?;
            }
            Err(error) => return Err(error),
        }
    }
}

fn wait_readable(fd: impl AsFd, deadline: Deadline) -> io::Result<()> {
    let remaining = deadline.remaining().ok_or(io::ErrorKind::TimedOut)?;
    let mut set = [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)];
    let timeout = rustix::event::Timespec {
        tv_sec: remaining.as_secs() as i64,
        tv_nsec: i64::from(remaining.subsec_nanos()),
    };
    match rustix::event::poll(&mut set, Some(&timeout)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn same_user(stream: UnixStream) -> io::Result<UnixStream> {
    let peer = rustix::net::sockopt::socket_peercred(&stream)?.uid;
    let own_uid = rustix::process::geteuid();
    if peer != own_uid {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!(
                "the peer of the socket runs as user {}, this process as {}",
                peer.as_raw(),
                own_uid.as_raw()
            ),
        ));
    }
    Ok(stream)
}

/// The process at the other end, as a descriptor that becomes readable when the process exits, in
/// any PID namespace. `None` if the kernel is older than Linux 6.5 and the process is not visible
/// in this process's namespace: then the caller relies on the socket's hang-up.
pub fn peer_process(stream: &UnixStream) -> Option<OwnedFd> {
    if let Some(process) = peer_option::<libc::c_int>(stream, libc::SO_PEERPIDFD) {
        // SAFETY: the kernel has just created this descriptor for this process.
        return Some(unsafe { OwnedFd::from_raw_fd(process) });
    }
    let peer = peer_option::<libc::ucred>(stream, libc::SO_PEERCRED)?;
    let peer = rustix::process::Pid::from_raw(peer.pid)?; // 0: in another namespace.
    rustix::process::pidfd_open(peer, rustix::process::PidfdFlags::empty()).ok()
}

fn peer_option<T>(stream: &UnixStream, option: libc::c_int) -> Option<T> {
    let mut value = MaybeUninit::<T>::uninit();
    let mut length = size_of::<T>() as libc::socklen_t;
    // SAFETY: a socket of this process, and a buffer of the given length.
    let status = unsafe {
        let place = value.as_mut_ptr().cast();
        libc::getsockopt(stream.as_raw_fd(), libc::SOL_SOCKET, option, place, &mut length)
    };
    // SAFETY: the kernel reports that it has written all of it, and every bit pattern is valid.
    (status == 0 && length as usize == size_of::<T>()).then(|| unsafe { value.assume_init() })
}

/// Retries a call that a signal interrupted. With a timeout on the socket, stopping and continuing
/// the process also interrupts it, even without a signal handler (signal(7)).
fn until_done<T>(
    deadline: Deadline,
    mut call: impl FnMut(Duration) -> io::Result<T>,
) -> io::Result<T> {
    loop {
        let remaining = deadline.remaining().ok_or(io::ErrorKind::TimedOut)?;
        match call(remaining) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(io::ErrorKind::TimedOut.into());
            }
            done => return done,
        }
    }
}

/// Sends a short message with descriptors.
///
/// # Errors
/// Returns the kernel's error; `InvalidInput` for more than [`DESCRIPTORS_MAX`].
pub fn send_descriptors(
    stream: &UnixStream,
    message: &[u8],
    descriptors: &[BorrowedFd<'_>],
    deadline: Deadline,
) -> io::Result<()> {
    if descriptors.len() > DESCRIPTORS_MAX {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    let message_slices = [rustix::io::IoSlice::new(message)];
    let sent_bytes = until_done(deadline, |remaining| {
        stream.set_write_timeout(Some(remaining))?;
        Ok(rustix::net::sendmsg(stream, &message_slices, &mut control, SendFlags::NOSIGNAL)?)
    })?;
    if sent_bytes == message.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// Receives one message of [`send_descriptors`]; the message must have exactly this length.
///
/// # Errors
/// `UnexpectedEof` if the peer has closed the socket, `InvalidData` for another length, or
/// `TimedOut`.
pub fn receive_descriptors(
    stream: &UnixStream,
    message: &mut [u8],
    deadline: Deadline,
) -> io::Result<Vec<OwnedFd>> {
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let length = message.len();
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::WAITALL;
    let mut message_slices = [rustix::io::IoSliceMut::new(message)];
    let received_bytes = until_done(deadline, |remaining| {
        stream.set_read_timeout(Some(remaining))?;
        Ok(rustix::net::recvmsg(stream, &mut message_slices, &mut control, flags)?)
    })?;
    let mut descriptors = Vec::new();
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = part {
            descriptors.extend(rights);
        }
    }
    if received_bytes.bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    if received_bytes.bytes != length || received_bytes.flags.contains(ReturnFlags::CTRUNC) {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok(descriptors)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(60))
    }

    #[test]
    fn two_mappings_of_one_segment_are_one_memory() {
        let name = format!("fabric-shm-test-{}", std::process::id());
        let listener = listen(&name).unwrap();
        let peer = std::thread::spawn(move || {
            let stream = dial(&name, soon()).unwrap();
            let mut message = [0; 4];
            let descriptors = receive_descriptors(&stream, &mut message, soon()).unwrap();
            assert_eq!(&message, b"here");
            let segment = Segment::open(descriptors.into_iter().next().unwrap(), 8192).unwrap();
            // SAFETY: inside the segment; the other side reads only after this process has exited.
            unsafe { segment.base().add(5000).write(42) };
            peer_process(&stream).is_some()
        });
        let segment = Segment::create("test", 8192).unwrap();
        let stream = accept(&listener, soon()).unwrap();
        send_descriptors(&stream, b"here", &[segment.fd()], soon()).unwrap();
        assert!(peer.join().unwrap());
        // SAFETY: inside the segment; the writer has exited.
        assert_eq!(unsafe { segment.base().add(5000).read() }, 42);
    }

    #[test]
    fn interrupted_calls_are_retried_within_the_deadline() {
        let mut remaining = vec![
            Ok(7),
            Err(io::ErrorKind::Interrupted.into()),
            Err(io::ErrorKind::Interrupted.into()),
        ];
        assert_eq!(until_done(soon(), |_| remaining.pop().unwrap()).unwrap(), 7);
        let late = until_done(soon(), |_| Err::<(), _>(io::ErrorKind::WouldBlock.into()));
        assert_eq!(late.unwrap_err().kind(), io::ErrorKind::TimedOut);
        let over = Deadline::after(Duration::ZERO);
        let again = until_done(over, |_| Err::<(), _>(io::ErrorKind::Interrupted.into()));
        assert_eq!(again.unwrap_err().kind(), io::ErrorKind::TimedOut);
    }

    #[test]
    fn a_segment_that_could_shrink_is_refused() {
        let fd = rustix::fs::memfd_create("loose", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, 4096).unwrap();
        assert_eq!(Segment::open(fd, 4096).unwrap_err().kind(), io::ErrorKind::InvalidData);
        let sealed = Segment::create("small", 4096).unwrap();
        let again = sealed.fd().try_clone_to_owned().unwrap();
        assert!(Segment::open(again, 8192).is_err());
    }

    #[test]
    fn a_segment_of_huge_pages_is_refused() {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
        let Ok(fd) = rustix::fs::memfd_create("huge", flags) else { return };
        rustix::fs::ftruncate(&fd, 32 << 20).unwrap();
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::SEAL).unwrap();
        let error = Segment::open(fd, 32 << 20).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");
    }

    #[test]
    fn a_view_reads_only_the_content_of_the_segment() {
        let segment = Segment::create("lent", 8192).unwrap();
        // SAFETY: inside the segment.
        unsafe { segment.base().add(4096).write(7) };
        let fd = segment.read_only_fd().unwrap();
        let view = View::open(&fd, 8192).unwrap();
        // SAFETY: inside the view; no process writes at this point.
        assert_eq!(unsafe { view.at(4096, 4096).unwrap().read() }, 7);
        assert!(view.at(4096, 4097).is_none() && view.at(u64::MAX, 2).is_none());
        let writable = mapping::Mapping::new(&fd, 8192, ProtFlags::READ | ProtFlags::WRITE);
        assert_eq!(writable.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        assert!(View::open(&fd, 4096).is_err());
    }

    #[test]
    fn waiting_for_a_missing_peer_times_out() {
        let name = format!("fabric-shm-unused-{}", std::process::id());
        let listener = listen(&name).unwrap();
        let error = accept(&listener, Deadline::after(Duration::from_millis(20))).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        let (one, _other) = UnixStream::pair().unwrap();
        let late = Deadline::after(Duration::from_millis(20));
        let error = receive_descriptors(&one, &mut [0; 4], late).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
