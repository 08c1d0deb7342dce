//! Extended attributes `user.gradfs.version`, `user.gradfs.dtype`, `user.gradfs.shape` and `user.gradfs.error`.

use super::filesystem::Fs;
use super::model_tree::ModelTree;
use super::node::{File, Node};
use crate::session::error::{CallError, CallResult};

const VERSION: &str = "user.gradfs.version";
const DTYPE: &str = "user.gradfs.dtype";
const SHAPE: &str = "user.gradfs.shape";
const ERROR: &str = "user.gradfs.error";

impl Fs {
    /// Names of the extended attributes of an inode.
    ///
    /// # Errors
    /// ENOENT.
    pub fn xattrs(&self, ino: u64) -> CallResult<Vec<&'static str>> {
        let Node::Model(index, file) = self.node(ino)? else { return Ok(Vec::new()) };
        let tree = self.tree(index)?;
        Ok([VERSION, DTYPE, SHAPE, ERROR]
            .into_iter()
            .filter(|name| value(&tree, file, name).is_some())
            .collect())
    }

    /// The value of one.
    ///
    /// # Errors
    /// ENODATA when the inode does not have it, EOPNOTSUPP for kinds of attributes that no inode has, ENOENT.
    pub fn xattr(&self, ino: u64, name: &str) -> CallResult<String> {
        // Asked for by the kernel itself, often: answered before anything is looked up. Access control lists and
        // security labels are asked for by `ls -l`, of one file only where it hears that there are none at all.
        if !name.starts_with("user.") {
            return Err(CallError::new(libc::EOPNOTSUPP, "no such kind of attribute"));
        }
        let none = || CallError::new(libc::ENODATA, "no such attribute");
        if !name.starts_with("user.gradfs.") {
            return Err(none());
        }
        let Node::Model(index, file) = self.node(ino)? else { return Err(none()) };
        value(&*self.tree(index)?, file, name).ok_or_else(none)
    }
}

fn value(tree: &ModelTree, file: File, name: &str) -> Option<String> {
    let tensors = tree.model.layout.tensors();
    let of_tensor = match file {
        File::Tensor(_, index) | File::RetainedTensor(_, index) => Some(tensors.get(index as usize)?),
        // A model of one tensor is that tensor.
        _ if tensors.len() == 1 => tensors.first(),
        _ => None,
    };
    let has_data = file.version().is_some() && !file.is_dir() && !matches!(file, File::RetainedText(_));
    let takes_data =
        matches!(file, File::Gradients(_) | File::LearnerGradients(..) | File::Device | File::Publish(_));
    match name {
        VERSION if file.version().is_some() => file.version().map(|version| version.to_string()),
        VERSION if matches!(file, File::Device | File::VersionText) => Some(tree.shown_version().to_string()),
        DTYPE if has_data || takes_data => Some(match of_tensor {
            Some(tensor) => tensor.dtype.name(),
            None if tensors.iter().all(|tensor| tensor.dtype == tensors[0].dtype) => tensors[0].dtype.name(),
            None => "mixed".to_owned(),
        }),
        SHAPE if has_data || takes_data => of_tensor.map(|tensor| {
            let sizes: Vec<String> = tensor.shape.iter().map(usize::to_string).collect();
            format!("[{}]", sizes.join(", "))
        }),
        ERROR => tree.refusal_of(file)?.text(),
        _ => None,
    }
}
