//! Namespace operations: path lookup, and creation, renaming and removal of names.

pub(crate) mod create;
pub(crate) mod directory;
pub(crate) mod link;
pub(crate) mod lookup;
pub(crate) mod query;
pub(crate) mod remove;
pub(crate) mod rename;
pub(crate) mod special;
