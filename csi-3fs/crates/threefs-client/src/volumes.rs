//! Volume operations: quotas, attributes, owners, free space.

use threefs_meta::{
    At, Inode, LayoutDefaults, MetaChange, MetaQuery, MetaReply, QuotaUse, SetMode,
};

use crate::Client;
use crate::error::{Attempts, ClientError};
use crate::files::inode;

/// Total inodes of a tree without limits, for `df`.
const INODES_TOTAL: u64 = 1 << 40;

/// Total bytes if no storage node reports its capacity, for `df`.
const CAPACITY_UNKNOWN: u64 = 1 << 50;

/// Space as shown by `df`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// Total bytes.
    pub bytes_total: u64,
    /// Free bytes.
    pub bytes_free: u64,
    /// Total inodes.
    pub inodes_total: u64,
    /// Free inodes.
    pub inodes_free: u64,
}

impl Client {
    /// Creates one directory with these permission bits. `defaults` is the layout of new files and
    /// directories in it; 0 = as in its parent.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn make_directory(
        &self,
        path: &str,
        mode: u32,
        defaults: LayoutDefaults,
    ) -> Result<Inode, ClientError> {
        let at = At::path(path);
        let change = MetaChange::MakeDirectory { at, mode, parents: false, defaults };
        inode(self.change("make directory", path, change).await?)
    }

    /// Sets the limits of a directory; `None` means unlimited.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn set_quota(
        &self,
        path: &str,
        bytes_max: Option<u64>,
        inodes_max: Option<u64>,
    ) -> Result<QuotaUse, ClientError> {
        let change = MetaChange::SetQuota { at: At::path(path), bytes_max, inodes_max };
        match self.change("set quota of", path, change).await? {
            MetaReply::Quotas(quotas) if quotas.len() == 1 => Ok(quotas[0]),
            other => Err(ClientError::unexpected("meta", &other)),
        }
    }

    /// The quotas that apply to a path or inode, innermost first.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn quotas(&self, at: At) -> Result<Vec<QuotaUse>, ClientError> {
        let path = at.path.clone();
        match self.query("quotas of", &path, MetaQuery::Quotas { at }).await? {
            MetaReply::Quotas(quotas) => Ok(quotas),
            other => Err(ClientError::unexpected("meta", &other)),
        }
    }

    /// Free space at a path or inode: that of the quota with the least free space, otherwise that
    /// of the storage nodes.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn space(&self, at: At) -> Result<Space, ClientError> {
        let quotas = self.quotas(at).await?;
        let mut space = Space {
            bytes_total: u64::MAX,
            bytes_free: u64::MAX,
            inodes_total: INODES_TOTAL,
            inodes_free: INODES_TOTAL,
        };
        for quota in &quotas {
            if let Some(max) = quota.bytes_max {
                let free = max.saturating_sub(quota.bytes_used);
                if free < space.bytes_free {
                    (space.bytes_total, space.bytes_free) = (max, free);
                }
            }
            if let Some(max) = quota.inodes_max {
                let free = max.saturating_sub(quota.inodes_used);
                if free < space.inodes_free {
                    (space.inodes_total, space.inodes_free) = (max, free);
                }
            }
        }
        if space.bytes_free == u64::MAX {
            (space.bytes_total, space.bytes_free) = self.capacity().await?;
        }
        Ok(space)
    }

    /// Sets an extended attribute, or removes it with `None`.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn set_attribute(
        &self,
        path: &str,
        name: &str,
        value: Option<Vec<u8>>,
    ) -> Result<(), ClientError> {
        let (at, name, mode) = (At::path(path), name.into(), SetMode::Any);
        let change = MetaChange::SetAttribute { at, name, value, mode };
        self.change("set attribute of", path, change).await.map(drop)
    }

    /// An extended attribute.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn attribute(&self, path: &str, name: &str) -> Result<Vec<u8>, ClientError> {
        let query = MetaQuery::GetAttribute { at: At::path(path), name: name.into() };
        match self.query("read attribute of", path, query).await? {
            MetaReply::Attribute(value) => Ok(value),
            other => Err(ClientError::unexpected("meta", &other)),
        }
    }

    /// Names of extended attributes, sorted.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn attributes(&self, path: &str) -> Result<Vec<String>, ClientError> {
        let query = MetaQuery::ListAttributes { at: At::path(path) };
        match self.query("list attributes of", path, query).await? {
            MetaReply::Names(names) => Ok(names),
            other => Err(ClientError::unexpected("meta", &other)),
        }
    }

    /// Sets permission bits and owners; `None` keeps the current value.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn set_owner(
        &self,
        path: &str,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
    ) -> Result<(), ClientError> {
        let change = MetaChange::SetAttributes {
            at: At::path(path),
            follow: true,
            mode,
            uid,
            gid,
            accessed: None,
            modified: None,
        };
        self.change("set attributes of", path, change).await.map(drop)
    }

    /// Total and free bytes of the storage nodes, divided by the number of replicas.
    async fn capacity(&self) -> Result<(u64, u64), ClientError> {
        let deadline = self.deadline();
        let status = self.mgmtd_result("capacity", self.0.routing.mgmtd.status(deadline).await)?;
        let mut attempts = Attempts::of("capacity");
        let Some(routing) = self.0.routing.current(&mut attempts, deadline).await? else {
            return Err(attempts.unavailable(self.0.config.timeout));
        };
        let replicas = routing.chains.values().map(|chain| chain.targets.len() as u64).max();
        let replicas = replicas.unwrap_or(1).max(1);
        let used: u64 = status.nodes.iter().map(|node| node.used_bytes).sum();
        let capacity: u64 = status.nodes.iter().map(|node| node.capacity_bytes).sum();
        let capacity = if capacity == 0 { CAPACITY_UNKNOWN } else { capacity };
        Ok((capacity / replicas, capacity.saturating_sub(used) / replicas))
    }
}
