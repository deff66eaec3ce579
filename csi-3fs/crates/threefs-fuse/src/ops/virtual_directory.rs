//! `3fs-virt`, a directory in the root of the mount that is not stored: the session file, which
//! callers open to use rings, and links of shared memory. It is found by its name and not listed,
//! so that programs that copy or remove a whole tree do not see it.
//!
//! A mount with a write-back cache has none: the kernel would not know what rings write.

use std::time::Duration;

use rustix::io::Errno;
use threefs_rings::control::{LINKS_DIRECTORY, SESSION_FILE};

use super::is_served;
use crate::daemon::{Call, Daemon};
use crate::rings::Link;
use crate::virtual_nodes::{DIRECTORY, FIRST_LINK, LINKS, SESSION};
use crate::wire::{self, Attributes, Body, Fields, opcode};

const S_IFDIR: u32 = 0o040_000;
const S_IFREG: u32 = 0o100_000;
const S_IFLNK: u32 = 0o120_000;
const NAME_BYTES_MAX: usize = 255;

impl Daemon {
    pub(super) fn virtual_directory_entry(&self) -> Body {
        self.node_entry(DIRECTORY, None)
    }

    pub(super) async fn execute_virtual(&self, call: &mut Call<'_>) -> Result<Body, Errno> {
        let node = call.request.node;
        match (call.request.opcode, node) {
            (opcode::LOOKUP, _) => self.look_up_virtual(call),
            (opcode::GETATTR, _) => {
                let link = self.memory_link(node);
                if node >= FIRST_LINK && link.is_none() {
                    return Err(Errno::STALE);
                }
                Ok(wire::attributes(&node_attributes(node, link.as_ref()), self.valid))
            }
            (opcode::OPENDIR, DIRECTORY | LINKS) => {
                Ok(wire::opened(Body::default(), self.handle(0), 0))
            }
            (opcode::READDIR | opcode::READDIRPLUS, _) => self.list_virtual(call),
            (opcode::OPEN, SESSION) => {
                let session = self.rings.sessions.open(call.request.uid)?;
                Ok(wire::opened(Body::default(), self.handle(session), 0))
            }
            (opcode::RELEASE, SESSION) => {
                let handle = Fields(&call.request.body).u64().ok_or(Errno::INVAL)?;
                self.end_session(handle, call.deadline).await;
                Ok(Body::default())
            }
            (opcode::IOCTL, SESSION) => self.control_session(call).await,
            (opcode::SYMLINK, LINKS) => self.make_link(call),
            (opcode::UNLINK, LINKS) => {
                let name = Fields(&call.request.body).name().ok_or(Errno::INVAL)?;
                let removed = self.rings.links.remove(name, call.request.uid);
                if removed { Ok(Body::default()) } else { Err(Errno::NOENT) }
            }
            (opcode::READLINK, _) => {
                let link = self.memory_link(node).filter(|link| link.user == call.request.uid);
                Ok(Body(link.ok_or(Errno::NOENT)?.target))
            }
            (opcode::STATFS, _) => self.space(call).await,
            // Reading the session file reads nothing.
            (opcode::READ | opcode::FLUSH | opcode::FSYNC, _)
            | (opcode::FSYNCDIR | opcode::RELEASEDIR | opcode::RELEASE, _) => Ok(Body::default()),
            (opcode::GETXATTR, _) => Err(Errno::NODATA),
            // Not ENOSYS, after which the kernel would not send the request for any file.
            (opcode, _) if is_served(opcode) => Err(Errno::PERM),
            _ => Err(Errno::NOSYS),
        }
    }

    fn look_up_virtual(&self, call: &Call<'_>) -> Result<Body, Errno> {
        let name = Fields(&call.request.body).name().ok_or(Errno::INVAL)?;
        match call.request.node {
            DIRECTORY if name == SESSION_FILE.as_bytes() => Ok(self.node_entry(SESSION, None)),
            DIRECTORY if name == LINKS_DIRECTORY.as_bytes() => Ok(self.node_entry(LINKS, None)),
            LINKS => {
                let link = self.rings.links.find(name, call.request.uid);
                let (number, link) = link.ok_or(Errno::NOENT)?;
                Ok(self.node_entry(FIRST_LINK + u64::from(number), Some(&link)))
            }
            _ => Err(Errno::NOENT),
        }
    }

    fn make_link(&self, call: &Call<'_>) -> Result<Body, Errno> {
        let mut fields = Fields(&call.request.body);
        let name = fields.name().ok_or(Errno::INVAL)?.to_vec();
        let target = fields.name().ok_or(Errno::INVAL)?.to_vec();
        if name.len() > NAME_BYTES_MAX || target.len() > NAME_BYTES_MAX {
            return Err(Errno::NAMETOOLONG);
        }
        let link = Link { name, target, user: call.request.uid, group: call.request.gid };
        let number = self.rings.links.add(link.clone())?;
        Ok(self.node_entry(FIRST_LINK + u64::from(number), Some(&link)))
    }

    fn list_virtual(&self, call: &Call<'_>) -> Result<Body, Errno> {
        let mut fields = Fields(&call.request.body);
        let (_handle, offset) =
            (fields.u64().ok_or(Errno::INVAL)?, fields.u64().ok_or(Errno::INVAL)?);
        let size = fields.u32().ok_or(Errno::INVAL)? as usize;
        let plus = call.request.opcode == opcode::READDIRPLUS;
        let node = call.request.node;
        let mut entries = vec![(node, S_IFDIR, b".".to_vec()), (node, S_IFDIR, b"..".to_vec())];
        if node == DIRECTORY {
            entries.push((LINKS, S_IFDIR, LINKS_DIRECTORY.into()));
            entries.push((SESSION, S_IFREG, SESSION_FILE.into()));
        } else {
            let links = self.rings.links.of_user(call.request.uid).into_iter();
            entries.extend(
                links.map(|(number, link)| (FIRST_LINK + u64::from(number), S_IFLNK, link.name)),
            );
        }
        let mut body = Body::default();
        for (index, (inode, mode, name)) in entries.into_iter().enumerate() {
            if (index as u64) < offset {
                continue;
            }
            if body.0.len() + wire::directory_entry_bytes(&name, plus) > size {
                break;
            }
            if plus {
                // The kernel looks the entry up itself.
                body = body.zeros(128);
            }
            body = wire::directory_entry(body, inode, index as u64 + 1, mode, &name);
        }
        Ok(body)
    }

    fn memory_link(&self, node: u64) -> Option<Link> {
        let number = u32::try_from(node.checked_sub(FIRST_LINK)?).ok()?;
        self.rings.links.get(number)
    }

    fn node_entry(&self, node: u64, link: Option<&Link>) -> Body {
        // Links differ between users: the kernel asks again for each.
        let valid = if link.is_some() { Duration::ZERO } else { self.valid };
        wire::entry(Body::default(), node, &node_attributes(node, link), valid)
    }
}

fn node_attributes(node: u64, link: Option<&Link>) -> Attributes {
    let mode = match node {
        DIRECTORY => S_IFDIR | 0o555,
        LINKS => S_IFDIR | 0o1777,
        SESSION => S_IFREG | 0o666,
        _ => S_IFLNK | 0o777,
    };
    let directory = mode & S_IFDIR != 0 && mode & S_IFREG == 0;
    let mut attributes = Attributes {
        inode: node,
        mode,
        links: if directory { 2 } else { 1 },
        ..Attributes::default()
    };
    if let Some(link) = link {
        attributes.size = link.target.len() as u64;
        (attributes.uid, attributes.gid) = (link.user, link.group);
    }
    attributes
}
