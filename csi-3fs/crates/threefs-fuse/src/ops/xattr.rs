//! Extended attribute operations.

use rustix::io::Errno;
use threefs_meta::{At, MetaChange, MetaQuery, MetaReply, SetMode};

use crate::daemon::{Call, Daemon, unexpected};
use crate::wire::{Body, Fields};

const XATTR_CREATE: u32 = 1;
const XATTR_REPLACE: u32 = 2;

impl Daemon {
    pub(crate) async fn set_attribute<'a>(&'a self, call: &mut Call<'a>) -> Result<Body, Errno> {
        let mut fields = Fields(&call.request.body);
        let (size, flags) = (fields.u32().ok_or(Errno::INVAL)?, fields.u32().ok_or(Errno::INVAL)?);
        let name = text(fields.name())?;
        let value = fields.0.get(..size as usize).ok_or(Errno::INVAL)?.to_vec();
        let mode = match flags {
            0 => SetMode::Any,
            XATTR_CREATE => SetMode::Create,
            XATTR_REPLACE => SetMode::Replace,
            _ => return Err(Errno::INVAL),
        };
        let at = At::inode(self.inode(call.request.node));
        let operation = format!("set attribute `{name}` of {}", at.directory);
        let change = MetaChange::SetAttribute { at, name, value: Some(value), mode };
        self.change(call, &operation, change).await?;
        Ok(Body::default())
    }

    pub(crate) async fn remove_attribute<'a>(&'a self, call: &mut Call<'a>) -> Result<Body, Errno> {
        let name = text(Fields(&call.request.body).name())?;
        let at = At::inode(self.inode(call.request.node));
        let operation = format!("remove attribute `{name}` of {}", at.directory);
        let change = MetaChange::SetAttribute { at, name, value: None, mode: SetMode::Any };
        self.change(call, &operation, change).await?;
        Ok(Body::default())
    }

    pub(crate) async fn get_attribute(&self, call: &mut Call<'_>) -> Result<Body, Errno> {
        let mut fields = Fields(&call.request.body);
        let (size, _padding) = (fields.u32().ok_or(Errno::INVAL)?, fields.u32());
        let name = text(fields.name())?;
        if !name.starts_with("user.") {
            // Requested before every write (security.capability) and by every `ls -l` (ACLs): 3FS
            // has none, so no query is sent.
            return Err(Errno::NODATA);
        }
        let at = At::inode(self.inode(call.request.node));
        let operation = format!("attribute `{name}` of {}", at.directory);
        match self.query(call, &operation, MetaQuery::GetAttribute { at, name }).await? {
            MetaReply::Attribute(value) => sized(value, size),
            other => Err(unexpected(&other)),
        }
    }

    pub(crate) async fn list_attributes(&self, call: &mut Call<'_>) -> Result<Body, Errno> {
        let size = Fields(&call.request.body).u32().ok_or(Errno::INVAL)?;
        let at = At::inode(self.inode(call.request.node));
        let operation = format!("list attributes of {}", at.directory);
        match self.query(call, &operation, MetaQuery::ListAttributes { at }).await? {
            MetaReply::Names(names) => {
                let all = names.iter().flat_map(|name| [name.as_bytes(), b"\0"]).flatten();
                sized(all.copied().collect(), size)
            }
            other => Err(unexpected(&other)),
        }
    }
}

/// A value, or only its length if the caller passes no buffer.
fn sized(value: Vec<u8>, size: u32) -> Result<Body, Errno> {
    match size as usize {
        // Bounded by the limits of an inode.
        0 => Ok(Body::default().u32(value.len() as u32).u32(0)),
        room if value.len() <= room => Ok(Body(value)),
        _ => Err(Errno::RANGE),
    }
}

fn text(name: Option<&[u8]>) -> Result<String, Errno> {
    let name = std::str::from_utf8(name.ok_or(Errno::INVAL)?);
    Ok(name.map_err(|_| Errno::ILSEQ)?.to_owned())
}
