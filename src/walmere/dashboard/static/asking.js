// The question before a button does something.

const dialog = document.getElementById("ask");
const [yes, failed] = [dialog.querySelector('button[value="yes"]'), dialog.querySelector(".failed")];
let current = null;

export function ask({ title, text, yes: label, action }) {
  current = action;
  dialog.querySelector("h2").textContent = title;
  dialog.querySelector("p").textContent = text;
  yes.textContent = label;
  yes.disabled = false;
  failed.hidden = true;
  dialog.showModal();
}

yes.addEventListener("click", async () => {
  yes.disabled = true;
  try {
    await current();
    dialog.close();
  } catch (error) {
    failed.textContent = error.message;
    failed.hidden = false;
    yes.disabled = false;
  }
});
