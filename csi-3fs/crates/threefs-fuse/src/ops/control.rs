//! ioctl requests: registration of memory, files and rings, and new submissions.

use std::sync::Arc;

use fabric::deadline::Deadline;
use rustix::io::Errno;
use threefs_rings::control::{
    FOR_READ, FORBID_HOLES, GET_MAGIC, MAGIC, Number, OWNED, REGISTER, REGISTER_FILE, REMOVE,
    Register, RegisterFile, SESSION, SUBMIT, Submit, VERSION,
};
use threefs_rings::{Layout, RegionTerms, RingTerms};

use super::handles::handle_access;
use crate::daemon::{Call, Daemon};
use crate::rings::{Entry, Region, RegisteredFile, Ring, Session};
use crate::wire::{Body, Fields};

/// An ioctl request.
struct Control<'a> {
    handle: u64,
    command: u32,
    data: &'a [u8],
}

impl<'a> Control<'a> {
    fn parse(body: &'a [u8]) -> Option<Self> {
        let mut fields = Fields(body);
        let handle = fields.u64()?;
        let (_flags, command, _argument) = (fields.u32()?, fields.u32()?, fields.u64()?);
        let (bytes, _room) = (fields.u32()? as usize, fields.u32()?);
        Some(Self { handle, command, data: fields.0.get(..bytes)? })
    }
}

/// A successful ioctl with its output.
fn answer(data: &[u8]) -> Body {
    let mut body = Body::default().zeros(16);
    body.0.extend_from_slice(data);
    body
}

impl Daemon {
    /// ioctl on an open file.
    pub(super) async fn control_file(&self, call: &mut Call<'_>) -> Result<Body, Errno> {
        let control = Control::parse(&call.request.body).ok_or(Errno::INVAL)?;
        match control.command {
            GET_MAGIC => Ok(answer(&MAGIC.to_le_bytes())),
            REGISTER_FILE if !self.write_back => self.register_file(call, &control).await,
            _ => Err(Errno::NOTTY),
        }
    }

    /// ioctl on the session file.
    pub(super) async fn control_session(&self, call: &mut Call<'_>) -> Result<Body, Errno> {
        let control = Control::parse(&call.request.body).ok_or(Errno::INVAL)?;
        if control.command == GET_MAGIC {
            return Ok(answer(&MAGIC.to_le_bytes()));
        }
        // A session of a previous daemon: its caller registers everything again.
        let session = if self.is_former(control.handle) { None } else { self.session(&control) };
        let session = session.ok_or(Errno::STALE)?;
        match control.command {
            SESSION => {
                let (token, user) = (session.token, rustix::process::geteuid().as_raw());
                let version = VERSION;
                let about = threefs_rings::control::Session { token, user, version };
                Ok(answer(&about.encode()))
            }
            REGISTER => {
                let request = Register::decode(control.data).ok_or(Errno::INVAL)?;
                let number = self.register(call, &session, &request)?;
                Ok(answer(&Register { number, ..request }.encode()))
            }
            REMOVE => {
                let target = Number::decode(control.data).ok_or(Errno::INVAL)?;
                self.remove_registration(&session, target, call.deadline).await?;
                Ok(answer(&[]))
            }
            SUBMIT => {
                let submit = Submit::decode(control.data).ok_or(Errno::INVAL)?;
                let ring = session.ring(submit.ring).ok_or(Errno::BADF)?;
                if ring.submit(submit.tail)? {
                    // The receiver ends with the daemon only.
                    let _ = self.rings.work.send((session, ring));
                }
                Ok(answer(&[]))
            }
            _ => Err(Errno::NOTTY),
        }
    }

    fn session(&self, control: &Control<'_>) -> Option<Arc<Session>> {
        self.rings.sessions.get(control.handle & 0xffff_ffff)
    }

    fn register(
        &self,
        call: &Call<'_>,
        session: &Session,
        request: &Register,
    ) -> Result<u32, Errno> {
        self.rings.sessions.add_region(session.user)?;
        let added = self.open_region(call, request).and_then(|entry| session.add(entry));
        if let Err(error) = added {
            self.rings.sessions.remove_regions(session.user, 1);
            tracing::debug!(
                memory = threefs_rings::memory_name(&request.id), %error, "registration refused"
            );
        }
        added
    }

    fn open_region(&self, call: &Call<'_>, request: &Register) -> Result<Entry, Errno> {
        let Register { id, bytes, block, entries, flags, limit, start, .. } = *request;
        let owned = flags & OWNED != 0;
        if flags & !(FOR_READ | FORBID_HOLES | OWNED) != 0 || block > bytes {
            return Err(Errno::INVAL);
        }
        let terms = RegionTerms { bytes, block };
        if entries == 0 {
            let region = Region::open(&id, owned, terms, call.request.uid)?;
            return Ok(Entry::Memory(Arc::new(region)));
        }
        let layout = Layout::new(entries).ok_or(Errno::INVAL)?;
        let for_read = flags & FOR_READ != 0;
        if bytes < layout.bytes() as u64 || block != 0 {
            return Err(Errno::INVAL);
        }
        if !for_read && self.read_only {
            return Err(Errno::ROFS);
        }
        let region = Region::open(&id, owned, terms, call.request.uid)?;
        let terms = RingTerms { entries, for_read };
        let ring = Ring::new(region, layout, terms, flags & FORBID_HOLES != 0, limit, start)?;
        Ok(Entry::Ring(Arc::new(ring)))
    }

    /// Registers an open file. The handle shows the access with which the caller opened it.
    async fn register_file(
        &self,
        call: &mut Call<'_>,
        control: &Control<'_>,
    ) -> Result<Body, Errno> {
        let request = RegisterFile::decode(control.data).ok_or(Errno::INVAL)?;
        let session = self.rings.sessions.by_token(&request.token).ok_or(Errno::STALE)?;
        let access = handle_access(control.handle);
        if !access.read && !access.write {
            // Opened by a daemon that did not record the access.
            return Err(Errno::BADF);
        }
        let inode = self.inode(call.request.node);
        self.file_of(call, control.handle).await?;
        self.drain(inode, call.deadline).await?;
        self.rings.sessions.add_file(session.user)?;
        if self.files.retain(inode).is_none() {
            self.rings.sessions.remove_files(session.user, 1);
            return Err(Errno::STALE);
        }
        match session.add_file(RegisteredFile { inode, access }) {
            Ok(number) => Ok(answer(&RegisterFile { number, ..request }.encode())),
            Err(error) => {
                self.rings.sessions.remove_files(session.user, 1);
                self.release_registered(inode, call.deadline).await;
                Err(error)
            }
        }
    }

    async fn remove_registration(
        &self,
        session: &Session,
        target: Number,
        deadline: Deadline,
    ) -> Result<(), Errno> {
        match target.kind {
            Number::REGION => {
                session.remove(target.number).ok_or(Errno::BADF)?;
                self.rings.sessions.remove_regions(session.user, 1);
            }
            Number::FILE => {
                let file = session.remove_file(target.number).ok_or(Errno::BADF)?;
                self.rings.sessions.remove_files(session.user, 1);
                self.release_registered(file.inode, deadline).await;
            }
            _ => return Err(Errno::INVAL),
        }
        Ok(())
    }

    /// Ends a session: its process has closed it, or has ended.
    pub(super) async fn end_session(&self, handle: u64, deadline: Deadline) {
        if self.is_former(handle) {
            return;
        }
        for file in self.rings.sessions.close(handle & 0xffff_ffff) {
            self.release_registered(file.inode, deadline).await;
        }
    }
}
