//! Namespace operations: creation, renaming, removal and listing of names.

pub(crate) mod create;
pub(crate) mod directory;
pub(crate) mod link;
pub(crate) mod query;
pub(crate) mod remove;
pub(crate) mod rename;
pub(crate) mod special;
