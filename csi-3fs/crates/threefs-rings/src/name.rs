//! Names of registered memory.
//!
//! The daemon opens memory by its name in `/dev/shm`. The name contains a random id of 128 bits that
//! only the registering process knows: a process that does not see the same `/dev/shm` cannot make
//! the daemon open memory for it.

/// Id of registered memory.
pub type Id = [u8; 16];

/// The folder of shared memory.
pub const MEMORY_FOLDER: &str = "/dev/shm";
const PREFIX: &str = "hf3fs-iov-";

/// Name of the memory with an id, in [`MEMORY_FOLDER`].
pub fn memory_name(id: &Id) -> String {
    use std::fmt::Write;
    id.iter().fold(PREFIX.to_owned(), |mut name, byte| {
        // Writing to a string does not fail.
        let _ = write!(name, "{byte:02x}");
        name
    })
}
