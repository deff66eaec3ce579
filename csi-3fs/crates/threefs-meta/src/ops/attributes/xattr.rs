//! Extended attributes: bounded, with the prefix `user.` only.

use threefs_core::ids::InodeId;
use threefs_kv::{KeyRange, KvError, Operation, Transaction};

use crate::identity::Identity;
use crate::ops::history::Owner;
use crate::ops::lookup::{FinalSymlink, find};
use crate::ops::quota;
use crate::ops::{Inputs, OpError, history, refuse_snapshot, store, view};
use crate::permission::{READ, WRITE};
use crate::protocol::{
    ATTRIBUTE_BYTES_MAX, ATTRIBUTES_BYTES_MAX, At, InodeKind, MetaError, MetaReply, NAME_BYTES_MAX,
    RESERVED_ATTRIBUTES, SetMode,
};
use crate::rows;
use crate::rows::history as keys;

/// `MetaQuery::GetAttribute`.
pub(crate) struct GetAttribute<'a> {
    pub caller: &'a Identity,
    pub at: &'a At,
    pub name: &'a str,
}

/// `MetaQuery::ListAttributes`.
pub(crate) struct ListAttributes<'a> {
    pub caller: &'a Identity,
    pub at: &'a At,
}

/// `MetaChange::SetAttribute`.
pub(crate) struct SetAttribute<'a> {
    pub caller: &'a Identity,
    pub at: &'a At,
    pub name: &'a str,
    /// `None` removes it.
    pub value: Option<&'a [u8]>,
    pub mode: &'a SetMode,
    pub inputs: Inputs,
}

impl Operation for GetAttribute<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let row = find(txn, self.caller, self.at, FinalSymlink::Keep).await?;
        self.caller.check(&row.inode, READ, &self.at.path)?;
        if !may_know(self.caller, self.name) {
            return Err(none(self.at, self.name));
        }
        match read(txn, row.inode.id, self.name).await? {
            Some(value) => Ok(MetaReply::Attribute(value)),
            None => Err(none(self.at, self.name)),
        }
    }
}

impl Operation for ListAttributes<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let row = find(txn, self.caller, self.at, FinalSymlink::Keep).await?;
        let names = all(txn, row.inode.id).await?.into_iter().map(|(name, _)| name);
        Ok(MetaReply::Names(names.filter(|name| may_know(self.caller, name)).collect()))
    }
}

impl Operation for SetAttribute<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let mut row = find(txn, self.caller, self.at, FinalSymlink::Keep).await?;
        check_name(self.name, self.at)?;
        if !may_know(self.caller, self.name) {
            let reason = format!(
                "attribute `{}`: names that start with `{RESERVED_ATTRIBUTES}` are reserved",
                self.name
            );
            return Err(MetaError::NotPermitted { path: self.at.path.clone(), reason }.into());
        }
        if matches!(row.inode.kind, InodeKind::Symlink { .. } | InodeKind::Special { .. }) {
            let reason = "only files and directories have user attributes".into();
            return Err(MetaError::NotPermitted { path: self.at.path.clone(), reason }.into());
        }
        self.caller.check(&row.inode, WRITE, &self.at.path)?;
        let key = rows::attribute(row.inode.id, self.name);
        refuse_snapshot(row.inode.id, &self.at.path)?;
        let attributes = all(txn, row.inode.id).await?;
        let exists = attributes.iter().any(|(name, _)| name == self.name);
        match (self.mode, exists) {
            (SetMode::Create, true) => {
                return Err(MetaError::Exists { path: self.name.into() }.into());
            }
            (SetMode::Replace | SetMode::Was(_), false) => return Err(none(self.at, self.name)),
            (SetMode::Was(before), true) if txn.get(&key).await?.as_ref() != Some(before) => {
                return Err(MetaError::Exists { path: self.name.into() }.into());
            }
            _ => {}
        }
        let formers = keys::former_attribute(row.inode.id, self.name);
        history::keep_value(txn, Owner::of(&row), &key, formers).await?;
        let before = attributes.iter().find(|(name, _)| name == self.name);
        let before = before.map_or(0, |(name, bytes)| name.len() + bytes);
        let after = self.value.map_or(0, |value| self.name.len() + value.len());
        match self.value {
            None if !exists => return Err(none(self.at, self.name)),
            None => txn.clear(&key),
            Some(value) => {
                let other_bytes: usize = attributes
                    .iter()
                    .filter(|(name, _)| name != self.name)
                    .map(|(name, bytes)| name.len() + bytes)
                    .sum();
                let total = other_bytes + self.name.len() + value.len();
                if value.len() > ATTRIBUTE_BYTES_MAX || total > ATTRIBUTES_BYTES_MAX {
                    let detail = format!(
                        "attribute `{}` of {} bytes: one holds at most {ATTRIBUTE_BYTES_MAX}, all \
                         of an inode with their names {ATTRIBUTES_BYTES_MAX}",
                        self.name,
                        value.len()
                    );
                    return Err(MetaError::NoSpace { detail }.into());
                }
                txn.set(&key, value);
            }
        }
        // Both are at most `ATTRIBUTES_BYTES_MAX`.
        quota::charge_metadata(txn, &mut row, after as i64 - before as i64).await?;
        row.inode.changed = self.inputs.now;
        store(txn, &mut row).await?;
        Ok(MetaReply::Done)
    }
}

/// The value of an attribute, which may be one of an inode of a snapshot.
async fn read(
    txn: &mut Transaction,
    inode: InodeId,
    name: &str,
) -> Result<Option<Vec<u8>>, OpError> {
    let Some((number, raw)) = view::split(inode) else {
        return Ok(txn.get(&rows::attribute(inode, name)).await?);
    };
    let (key, formers) = (rows::attribute(raw, name), keys::former_attribute(raw, name));
    Ok(view::value(txn, number, raw, &key, &formers).await?)
}

/// Names and lengths, sorted by name.
async fn all(txn: &mut Transaction, inode: InodeId) -> Result<Vec<(String, usize)>, OpError> {
    if let Some((number, raw)) = view::split(inode) {
        let found = view::attributes(txn, number, raw).await?;
        let name = |(name, bytes)| Some((String::from_utf8(name).ok()?, bytes));
        return Ok(found.into_iter().filter_map(name).collect());
    }
    let prefix = rows::attributes(inode);
    let rows_read = txn.range(&KeyRange::prefix(&prefix), usize::MAX).await?;
    let names = rows_read.into_iter().map(|(key, value)| {
        let name = String::from_utf8(key.get(prefix.len()..).unwrap_or_default().to_vec())
            .map_err(|_| KvError::bad_row(&key, "the name is not UTF-8"))?;
        Ok::<_, KvError>((name, value.len()))
    });
    Ok(names.collect::<Result<_, _>>()?)
}

/// Whether the caller may see, set and remove an attribute with this name.
fn may_know(caller: &Identity, name: &str) -> bool {
    caller.is_control_plane() || !name.starts_with(RESERVED_ATTRIBUTES)
}

fn check_name(name: &str, at: &At) -> Result<(), OpError> {
    if name.len() > NAME_BYTES_MAX {
        return Err(MetaError::NameTooLong { name: name.chars().take(40).collect() }.into());
    }
    match name.strip_prefix("user.") {
        Some(rest) if !rest.is_empty() && !rest.contains('\0') => Ok(()),
        _ => Err(MetaError::NotSupported {
            path: at.path.clone(),
            reason: format!("attribute `{}`: names must start with `user.`", name.escape_debug()),
        }
        .into()),
    }
}

fn none(at: &At, name: &str) -> OpError {
    MetaError::NoAttribute { path: at.path.clone(), name: name.into() }.into()
}
