//! File system operations, by subject; [`Daemon::execute`] dispatches a request to its operation.

use rustix::io::Errno;

use crate::daemon::{Call, Daemon};
use crate::virtual_nodes::is_virtual;
use crate::wire::{Body, opcode};

mod allocate;
mod append;
mod append_release;
mod attributes;
mod behind;
mod control;
mod data;
mod directories;
mod handles;
mod lock_release;
mod lock_session;
mod locks;
mod names;
mod open;
mod reserve;
mod ring_io;
mod ring_reads;
mod virtual_directory;
mod writeback;
mod xattr;

/// Number of truncations by other clients after which an operation gives up.
const TRUNCATIONS_MAX: usize = 16;

/// Whether the daemon serves a request for some files.
fn is_served(code: u32) -> bool {
    matches!(
        code,
        opcode::LOOKUP
            | opcode::GETATTR
            | opcode::SETATTR
            | opcode::READLINK
            | opcode::SYMLINK
            | opcode::MKNOD..=opcode::STATFS
            | opcode::RELEASE..=opcode::FLUSH
            | opcode::GETLK..=opcode::SETLKW
            | opcode::OPENDIR..=opcode::FSYNCDIR
            | opcode::CREATE
            | opcode::IOCTL
            | opcode::FALLOCATE..=opcode::LSEEK
    )
}

impl Daemon {
    pub(crate) async fn execute<'a>(&'a self, call: &mut Call<'a>) -> Result<Body, Errno> {
        match call.request.opcode {
            opcode::READ if !is_virtual(call.request.node) => self.read(call).await,
            // In a separate allocation: the task of a read is small.
            _ => Box::pin(self.execute_other(call)).await,
        }
    }

    async fn execute_other<'a>(&'a self, call: &mut Call<'a>) -> Result<Body, Errno> {
        if is_virtual(call.request.node) {
            return self.execute_virtual(call).await;
        }
        let changes = matches!(
            call.request.opcode,
            opcode::WRITE | opcode::FALLOCATE | opcode::SETXATTR | opcode::REMOVEXATTR
        );
        if changes && self.read_only {
            return Err(Errno::ROFS);
        }
        match call.request.opcode {
            opcode::LOOKUP => self.lookup(call).await,
            opcode::GETATTR => self.get_attributes(call).await,
            opcode::SETATTR => self.set_attributes(call).await,
            opcode::READLINK => self.read_link(call).await,
            opcode::SYMLINK => self.symlink(call).await,
            opcode::MKNOD => self.make_node(call).await,
            opcode::MKDIR => self.make_directory(call).await,
            opcode::UNLINK | opcode::RMDIR => self.remove(call).await,
            opcode::RENAME | opcode::RENAME2 => self.rename(call).await,
            opcode::LINK => self.link(call).await,
            opcode::OPEN => self.open(call).await,
            opcode::CREATE => self.create(call).await,
            opcode::WRITE => self.write(call).await,
            opcode::FLUSH => self.flush(call).await,
            opcode::FSYNC => self.fsync(call).await,
            opcode::RELEASE => self.release(call).await,
            opcode::GETLK => self.test_lock(call).await,
            opcode::SETLK | opcode::SETLKW => self.set_lock(call).await,
            opcode::FALLOCATE => self.allocate(call).await,
            // With a write-back cache the kernel knows lengths that this daemon does not: it
            // answers itself.
            opcode::LSEEK if self.write_back => Err(Errno::NOSYS),
            opcode::LSEEK => self.seek(call).await,
            opcode::IOCTL => self.control_file(call).await,
            opcode::OPENDIR => self.open_directory(call).await,
            opcode::READDIR | opcode::READDIRPLUS => self.read_directory(call).await,
            opcode::RELEASEDIR => Ok(self.release_directory(call)),
            opcode::FSYNCDIR | opcode::SYNCFS | opcode::DESTROY => Ok(Body::default()),
            opcode::STATFS => self.space(call).await,
            opcode::SETXATTR => self.set_attribute(call).await,
            opcode::GETXATTR => self.get_attribute(call).await,
            opcode::LISTXATTR => self.list_attributes(call).await,
            opcode::REMOVEXATTR => self.remove_attribute(call).await,
            _ => Err(Errno::NOSYS),
        }
    }
}
