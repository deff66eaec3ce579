//! ioctl calls on session files and on open files.

use std::os::fd::{AsRawFd, RawFd};

use rustix::io::Errno;
use threefs_rings::control::{
    GET_MAGIC, Number, REGISTER, REGISTER_FILE, REMOVE, Register, RegisterFile, SESSION, SUBMIT,
    Session, Submit,
};

fn call<const N: usize>(fd: RawFd, command: u32, data: &mut [u8; N]) -> Result<(), Errno> {
    loop {
        // SAFETY: the command's number contains the size of its argument, which is N: the callers
        // below pass each command with the bytes of its message.
        let result = unsafe { libc::ioctl(fd, command.into(), data.as_mut_ptr()) };
        if result == 0 {
            return Ok(());
        }
        match std::io::Error::last_os_error().raw_os_error().map(Errno::from_raw_os_error) {
            Some(Errno::INTR) => {}
            error => return Err(error.unwrap_or(Errno::IO)),
        }
    }
}

pub(crate) fn magic(fd: RawFd) -> Result<u32, Errno> {
    let mut data = [0; 4];
    call(fd, GET_MAGIC, &mut data)?;
    Ok(u32::from_le_bytes(data))
}

pub(crate) fn session(fd: &impl AsRawFd) -> Result<Session, Errno> {
    let mut data = [0; Session::BYTES];
    call(fd.as_raw_fd(), SESSION, &mut data)?;
    Session::decode(&data).ok_or(Errno::IO)
}

pub(crate) fn register(fd: &impl AsRawFd, request: &Register) -> Result<u32, Errno> {
    let mut data = request.encode();
    call(fd.as_raw_fd(), REGISTER, &mut data)?;
    Register::decode(&data).map(|reply| reply.number).ok_or(Errno::IO)
}

pub(crate) fn register_file(fd: &impl AsRawFd, token: [u8; 16]) -> Result<u32, Errno> {
    let mut data = RegisterFile { token, number: 0 }.encode();
    call(fd.as_raw_fd(), REGISTER_FILE, &mut data)?;
    RegisterFile::decode(&data).map(|reply| reply.number).ok_or(Errno::IO)
}

pub(crate) fn remove(fd: &impl AsRawFd, kind: u32, number: u32) -> Result<(), Errno> {
    call(fd.as_raw_fd(), REMOVE, &mut Number { kind, number }.encode())
}

pub(crate) fn submit(fd: &impl AsRawFd, ring: u32, tail: u32) -> Result<(), Errno> {
    call(fd.as_raw_fd(), SUBMIT, &mut Submit { ring, tail }.encode())
}
