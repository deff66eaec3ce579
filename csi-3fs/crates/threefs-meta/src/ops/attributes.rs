//! Attributes: mode, owner and times of an inode, and its extended attributes.

pub(crate) mod set_attributes;
pub(crate) mod xattr;
